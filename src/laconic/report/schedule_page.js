// Draws the figures of a page about many jobs from the JSON document in #data; schedule_page.py says what it holds.
"use strict";
(() => {
  const { D, colour, esc, nameOf, inkOf, hover, width, isNarrow, axis, layout } = figures;
  const { duration, timeUnit, percent } = units;
  stage.state.policy = 0;

  const current = (list) => list.find((item) => item.strategy === stage.state.policy);
  const timeAxis = (unit, more) => axis({ title: `time (${unit[0]})`, rangemode: "tozero", ...more });

  // How many jobs have ended after how long

  function cdfFigure(name) {
    const shown = D.cdfs.filter(stage.isShown);
    if (!shown.length) return null;
    const unit = timeUnit(Math.max(...shown.map((item) => item.seconds.at(-1))));
    return {
      data: shown.map((item) => ({
        type: "scatter",
        mode: "lines",
        name: nameOf(item),
        x: [0, ...item.seconds].map((time) => time / unit[1]),
        y: [0, ...item.seconds].map((_, index) => index / item.seconds.length),
        line: { color: inkOf(item), width: 2, shape: "hv" },
        hovertemplate: [0, ...item.seconds].map((time, index) =>
          hover(item, `${percent(index / item.seconds.length)} within ${duration(time, unit)}`),
        ),
      })),
      layout: layout(isNarrow(name) ? 320 : 400, {
        xaxis: timeAxis(unit, { title: `completion time (${unit[0]})` }),
        yaxis: axis({ title: "share of jobs", range: [0, 1.02], tickformat: ".0%" }),
      }),
    };
  }

  // One line for each job

  // [from, to, gap] for each piece, so that one trace draws them all.
  const pieces = (list, from, to) => list.flatMap((item) => [from(item), to(item), null]);
  const INKS = ["s0", "s1", "s2", "s3", "s4"];

  function ganttFigure(name) {
    const chart = current(D.charts);
    if (!chart || !chart.jobs.length) return null;
    const unit = timeUnit(Math.max(...chart.jobs.map((job) => job[2])));
    const time = (seconds) => seconds / unit[1];
    const sizes = [...new Set(chart.stays.map((stay) => stay[3]))].sort((a, b) => a - b);
    const inkOfSize = (size) => INKS[Math.min(INKS.length - 1, sizes.indexOf(size))];
    const row = chart.jobs.length > 60 ? 5 : 12;
    const waits = {
      type: "scatter",
      mode: "lines",
      name: "waiting",
      x: pieces(chart.jobs, (job) => time(job[1]), (job) => time(job[2])),
      y: chart.jobs.flatMap((_, index) => [index, index, null]),
      line: { color: colour("muted"), width: 1 },
      opacity: 0.4,
      hoverinfo: "skip",
    };
    const runs = sizes.map((size) => {
      const own = chart.stays.filter((stay) => stay[3] === size);
      return {
        name: `${size} GPUs`,
        type: "scatter",
        mode: "lines",
        x: pieces(own, (stay) => time(stay[1]), (stay) => time(stay[2])),
        y: pieces(own, (stay) => stay[0], (stay) => stay[0]),
        line: { color: colour(inkOfSize(size)), width: Math.max(2, row - 2) },
        text: pieces(own, (stay) => esc(chart.jobs[stay[0]][0]), (stay) => esc(chart.jobs[stay[0]][0])),
        hovertemplate: `job %{text}<br>${size} GPUs<br>at %{x:.2f} ${unit[0]}<extra></extra>`,
        connectgaps: false,
      };
    });
    return {
      data: [waits, ...runs],
      layout: layout(90 + row * chart.jobs.length, {
        xaxis: timeAxis(unit, {}),
        yaxis: axis({ title: "jobs in order of arrival", range: [chart.jobs.length, -1], showgrid: false }),
      }),
      key: sizes.slice(0, INKS.length).map((size, index) => {
        const others = index === INKS.length - 1 && sizes.length > INKS.length ? " or more" : "";
        return [inkOfSize(size), `${size}${others} GPU${size > 1 || others ? "s" : ""}`];
      }),
    };
  }

  // A square for each link and stretch of time

  function linksFigure(name) {
    const links = current(D.links);
    if (!links || !links.names.length) return null;
    const unit = timeUnit(links.times.at(-1) || 1);
    const cells = links.names.flatMap((_, row) => links.times.map((_, column) => [row, column]));
    const load = ([row, column]) => links.load[row][column];
    const room = width(name) - 170;
    return {
      data: [
        {
          type: "scatter",
          mode: "markers",
          x: cells.map(([, column]) => links.times[column] / unit[1]),
          y: cells.map(([row]) => row),
          marker: {
            symbol: "square",
            // Narrow columns overlap, so that rows stay bands.
            size: Math.max(10, Math.min(14, room / links.times.length)),
            color: cells.map(load),
            cmin: 0,
            cmax: 1,
            colorscale: [[0, colour("grid")], [1, colour("exposed")]],
          },
          hovertemplate: cells.map(
            ([row, column]) => `${esc(links.names[row])}<br>busy ${percent(load([row, column]))}<extra></extra>`,
          ),
        },
      ],
      layout: layout(90 + 16 * links.names.length, {
        xaxis: timeAxis(unit, { showgrid: false }),
        yaxis: axis({
          range: [links.names.length - 0.4, -0.6],
          tickvals: links.names.map((_, row) => row),
          ticktext: links.names.map(esc),
          showgrid: false,
        }),
      }),
    };
  }

  function writeTags() {
    for (const tag of document.querySelectorAll('[data-tag="gantt"], [data-tag="links"]')) {
      tag.textContent = D.strategies[stage.state.policy].name;
      tag.hidden = false;
    }
  }

  stage.open({ cdf: cdfFigure, gantt: ganttFigure, links: linksFigure }, writeTags, () => true);
})();
