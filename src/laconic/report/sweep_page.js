// Draws the figures of a page about simulations from the JSON document in #data; sweep_page.py says what it holds.
"use strict";
(() => {
  const { D, colour, esc, wrapped, strategyOf, inkOf, width, isNarrow, axis, layout, logTicks } = figures;
  const { count, percent, ms } = units;
  const { state } = stage;
  Object.assign(state, { bandwidth: 0, workers: 0 });

  const shown = (...keys) => stage.chosen(D.rows, ...keys);
  const where = (row) => `${D.workers[row.workers]} workers, ${D.bandwidths[row.bandwidth].label}`;
  const hover = (row, ...lines) => figures.hover(row, where(row), ...lines, wrapped(row.why));

  // A logarithmic axis with a tick at every value there is; where they would touch, fewer.
  const valuesAxis = (title, values, labels, room) => {
    const perTick = Math.max(1, Math.ceil((values.length * 58) / room));
    const kept = values.map((_, index) => index).filter((index) => (values.length - 1 - index) % perTick === 0);
    return axis({
      title,
      type: "log",
      tickvals: kept.map((index) => values[index]),
      ticktext: kept.map((index) => esc(labels[index])),
    });
  };
  // Lines against workers or bandwidth

  const dotted = (x, y) => ({
    type: "scatter",
    mode: "lines",
    name: "without communication",
    x,
    y,
    line: { color: colour("muted"), width: 1.5, dash: "dot" },
    hoverinfo: "skip",
  });
  const atWorkers = (row) => D.workers[row.workers];
  const atBandwidth = (row) => D.bandwidths[row.bandwidth].bps;

  function throughputFigure(name) {
    const rows = shown("bandwidth");
    if (!rows.length) return null;
    const best = Math.max(...rows.map((row) => row.samples_per_s / row.efficiency / atWorkers(row)));
    const words = (row) =>
      hover(row, `${count(row.samples_per_s)} samples/s, efficiency ${percent(row.efficiency)}`);
    const values = rows.map((row) => row.samples_per_s);
    const ticks = logTicks([...values, best * D.workers.at(-1)]);
    return {
      data: [
        dotted(D.workers, D.workers.map((number) => number * best)),
        ...figures.curves(rows, "workers", atWorkers, (row) => row.samples_per_s, words),
      ],
      layout: layout(isNarrow(name) ? 340 : 430, {
        xaxis: valuesAxis("workers (logarithmic)", D.workers, D.workers.map(count), width(name) - 90),
        yaxis: axis({ title: "samples/s (logarithmic)", type: "log", tickvals: ticks, ticktext: ticks.map(count) }),
      }),
    };
  }

  function efficiencyFigure(name) {
    const rows = shown("bandwidth");
    if (!rows.length) return null;
    const words = (row) => hover(row, `efficiency ${percent(row.efficiency)}, step ${ms(row.step_ms)} ms`);
    const high = Math.max(1, ...rows.map((row) => row.efficiency));
    return {
      data: figures.curves(rows, "workers", atWorkers, (row) => row.efficiency, words),
      layout: layout(isNarrow(name) ? 320 : 380, {
        xaxis: valuesAxis("workers (logarithmic)", D.workers, D.workers.map(count), width(name) - 90),
        yaxis: axis({ title: "efficiency", range: [0, high * 1.04], tickformat: ".0%" }),
      }),
    };
  }

  function stepBandwidthFigure(name) {
    const rows = shown("workers");
    if (!rows.length) return null;
    const words = (row) => hover(row, `step ${ms(row.step_ms)} ms, exposed ${ms(row.exposed_ms)} ms`);
    const compute = Math.min(...rows.map((row) => row.compute_ms));
    const ticks = logTicks([compute, ...rows.map((row) => row.step_ms)]);
    const bps = D.bandwidths.map((bandwidth) => bandwidth.bps);
    const labels = D.bandwidths.map((bandwidth) => bandwidth.label);
    return {
      data: [
        dotted([bps[0], bps.at(-1)], [compute, compute]),
        ...figures.curves(rows, "bandwidth", atBandwidth, (row) => row.step_ms, words),
      ],
      layout: layout(isNarrow(name) ? 340 : 430, {
        xaxis: valuesAxis("bandwidth of every host (logarithmic)", bps, labels, width(name) - 90),
        yaxis: axis({ title: "step (ms, logarithmic)", type: "log", tickvals: ticks, ticktext: ticks.map(ms) }),
      }),
    };
  }

  // Rows of bars and marks

  function stepFigure(name) {
    const words = (row, parts) =>
      hover(row, `step ${ms(row.step_ms)} ms`, ...parts.map(([key, , what]) => `${what} ${ms(row[key])} ms`));
    const waiting = ["exposed_ms", "exposed", "waiting for communication"];
    return figures.stepTimes(name, shown("bandwidth", "workers"), [waiting], (row) => row.spread_ms, words);
  }

  function targetFigure(name) {
    const here = shown("bandwidth", "workers");
    const rows = here.filter((row) => row.target_s);
    if (!rows.length) return null;
    const places = figures.rowPlaces(name, rows);
    const most = Math.max(...rows.map((row) => row.target_s[2]));
    const unit = units.timeUnit(most);
    const time = (value) => units.duration(value, unit);
    const scaled = (...times) => times.map((value) => value / unit[1]);
    const spreads = rows.map(({ target_s: [middle, low, high] }) => scaled(low, middle, high));
    const middles = spreads.map(([, middle]) => middle);
    const highs = spreads.map(([, , high]) => high);
    const words = ({ target_s: [middle, low, high], ...row }) =>
      hover(row, `${time(middle)}, between ${time(low)} and ${time(high)}`);
    const points = {
      type: "scatter",
      mode: "markers",
      x: middles,
      y: places.y,
      marker: { symbol: rows.map((row) => strategyOf(row).symbol), size: 12, color: rows.map(inkOf) },
      hovertemplate: rows.map(words),
      // A saved figure would name these marks "trace 1"; the rows have their names already.
      showlegend: false,
      cliponaxis: false,
    };
    const numbers = figures.texts(highs, places.y, rows.map((row) => time(row.target_s[0])));
    const xaxis = figures.valueAxis(name, `time (${unit[0]})`, most / unit[1], places.narrow);
    return {
      data: [figures.whiskers(spreads, places.y), points, numbers],
      layout: figures.rowsLayout(places, xaxis),
      aside: stage.missing(rows, here, "not measured"),
    };
  }

  const FIGURES = {
    throughput: throughputFigure,
    efficiency: efficiencyFigure,
    "step-bandwidth": stepBandwidthFigure,
    "step-time": stepFigure,
    target: targetFigure,
  };
  // What is chosen for a figure and not drawn along one of its axes.
  const FIXED = {
    throughput: ["bandwidth"],
    efficiency: ["bandwidth"],
    "step-bandwidth": ["workers"],
    "step-time": ["workers", "bandwidth"],
    target: ["workers", "bandwidth"],
  };
  const tags = {
    bandwidth: () => (D.bandwidths.length > 1 ? D.bandwidths[state.bandwidth].label : ""),
    workers: () => (D.workers.length > 1 ? `${D.workers[state.workers]} workers` : ""),
  };

  function writeTags() {
    for (const tag of document.querySelectorAll("[data-tag]")) {
      tag.textContent = FIXED[tag.dataset.tag].map((which) => tags[which]()).filter(Boolean).join(", ");
      tag.hidden = !tag.textContent;
    }
  }

  stage.open(FIGURES, writeTags, () => true);
})();
