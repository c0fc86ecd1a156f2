// Draws the figures of a page about an elastic run from the JSON document in #data; elastic_page.py says what it holds.
"use strict";
(() => {
  const { D, colour, esc, nameOf, inkOf, isNarrow, axis, layout } = figures;
  const { timeUnit, duration } = units;
  const unit = timeUnit(D.seconds || 1);
  const time = (seconds) => seconds / unit[1];
  const timeAxis = () => axis({ title: `time (${unit[0]})`, range: [0, time(D.seconds) * 1.02] });
  const height = (name) => (isNarrow(name) ? 300 : 360);

  // Faults as dotted lines over the whole height, with their words at the bottom
  const faultLines = () =>
    D.faults.map((fault) => ({
      type: "line",
      x0: time(fault.time),
      x1: time(fault.time),
      yref: "paper",
      y0: 0,
      y1: 1,
      line: { color: colour("exposed"), width: 1, dash: "dot" },
    }));
  const faultMarks = (y) => ({
    type: "scatter",
    mode: "markers",
    name: "faults",
    x: D.faults.map((fault) => time(fault.time)),
    y: D.faults.map(() => y),
    marker: { symbol: "x", size: 8, color: colour("exposed") },
    hovertemplate: D.faults.map((fault) => `${esc(fault.words)}<br>at ${duration(fault.time, unit)}<extra></extra>`),
  });

  function membersFigure(name) {
    const shown = D.stays.filter(stage.isShown);
    if (!shown.length) return null;
    const rows = [...new Set(shown.map((stay) => stay.strategy))].sort((a, b) => a - b);
    const bars = shown.map((stay) => ({
      type: "scatter",
      mode: "lines",
      name: nameOf(stay),
      x: [time(stay.begin), time(stay.end)],
      y: [rows.indexOf(stay.strategy), rows.indexOf(stay.strategy)],
      line: { color: inkOf(stay), width: 9 },
      hovertemplate: `<b>${nameOf(stay)}</b><br>${duration(stay.begin, unit)} to ${duration(stay.end, unit)}<extra></extra>`,
    }));
    return {
      data: [...bars, faultMarks(rows.length - 0.4)],
      layout: layout(110 + 22 * rows.length, {
        xaxis: timeAxis(),
        yaxis: axis({
          range: [rows.length, -0.8],
          tickvals: rows.map((_, place) => place),
          ticktext: rows.map((row) => nameOf({ strategy: row })),
          showgrid: false,
        }),
        shapes: faultLines(),
      }),
    };
  }

  function progressFigure(name) {
    if (!D.progress.length) return null;
    const steps = {
      type: "scatter",
      mode: "lines",
      name: "completed",
      x: D.progress.map(([seconds]) => time(seconds)),
      y: D.progress.map(([, count]) => count),
      line: { color: colour("accent"), width: 2 },
      hovertemplate: D.progress.map(([seconds, count]) => `${count} after ${duration(seconds, unit)}<extra></extra>`),
    };
    const ranks = {
      type: "scatter",
      mode: "lines",
      name: "ranks",
      x: [...D.counts.map(([seconds]) => time(seconds)), time(D.seconds)],
      y: [...D.counts.map(([, count]) => count), D.counts.at(-1)[1]],
      line: { color: colour("ddp"), width: 2, shape: "hv" },
      yaxis: "y2",
      hovertemplate: "%{y} ranks<extra></extra>",
    };
    return {
      data: [steps, ranks],
      layout: layout(height(name), {
        xaxis: timeAxis(),
        yaxis: axis({ title: "steps or rounds", rangemode: "tozero" }),
        yaxis2: axis({ title: "ranks", rangemode: "tozero", overlaying: "y", side: "right", showgrid: false, dtick: 1 }),
        margin: { l: 8, r: 48, t: 12, b: 8 },
        shapes: faultLines(),
      }),
      key: [["accent", "steps or rounds completed"], ["ddp", "ranks"]],
    };
  }

  function lostFigure(name) {
    if (!D.changes.length) return null;
    return {
      data: [
        {
          type: "bar",
          name: "seconds lost",
          x: D.changes.map((change) => `view ${change.view}`),
          y: D.changes.map((change) => change.lost),
          marker: { color: colour("exposed") },
          hovertemplate: D.changes.map((change) => `${esc(change.words)}<br>%{y:.2f} s lost<extra></extra>`),
        },
      ],
      layout: layout(height(name), {
        bargap: 0.4,
        xaxis: axis({ type: "category" }),
        yaxis: axis({ title: "seconds lost", rangemode: "tozero" }),
      }),
    };
  }

  stage.open({ members: membersFigure, progress: progressFigure, lost: lostFigure }, () => {}, () => true);
})();
