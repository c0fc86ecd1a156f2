// Draws the figures of a page about a plan from the JSON document in #data; plan_page.py says what it holds.
"use strict";
(() => {
  const { D, colour, esc, wrapped, strategyOf, inkOf, hover, width, isNarrow, axis, layout, logTicks } = figures;
  const { count, duration, timeUnit } = units;

  const distinct = (values) => [...new Set(values)].sort((a, b) => a - b);
  const times = (value) => (value >= 10 ? count(value) : value.toFixed(1));

  // What is best where: a square for each bandwidth and number of workers

  function mapFigure(name) {
    const cells = D.cells.filter(stage.isShown);
    if (!cells.length) return null;
    const rates = distinct(D.cells.map((cell) => cell.bps));
    const workers = distinct(D.cells.map((cell) => cell.workers));
    const size = Math.max(14, Math.min(54, (width(name) - 110) / rates.length - 4));
    const labels = new Map(D.cells.map((cell) => [cell.bps, cell.rate]));
    const every = Math.max(1, Math.ceil((rates.length * 78) / (width(name) - 110)));
    const words = (cell) => hover(cell, `${cell.workers} workers, ${esc(cell.rate)}`, `${times(cell.sooner)} times sooner`);
    const byStrategy = distinct(cells.map((cell) => cell.strategy)).map((strategy) => {
      const own = cells.filter((cell) => cell.strategy === strategy);
      return {
        type: "scatter",
        mode: size >= 30 ? "markers+text" : "markers",
        name: strategyOf(own[0]).name,
        x: own.map((cell) => rates.indexOf(cell.bps)),
        y: own.map((cell) => workers.indexOf(cell.workers)),
        text: own.map((cell) => `${times(cell.sooner)}x`),
        textfont: { color: colour("page"), size: 12 },
        marker: { symbol: "square", size, color: inkOf(own[0]) },
        hovertemplate: own.map(words),
        cliponaxis: false,
      };
    });
    const nearest = rates.reduce((best, rate) =>
      Math.abs(Math.log(rate / D.here.bps)) < Math.abs(Math.log(best / D.here.bps)) ? rate : best,
    );
    const ring = {
      type: "scatter",
      mode: "markers",
      x: [rates.indexOf(nearest)],
      y: [workers.indexOf(D.here.workers)],
      marker: { symbol: "square-open", size: size + 6, color: colour("text"), line: { width: 3 } },
      hoverinfo: "skip",
      showlegend: false,
      cliponaxis: false,
    };
    const ticks = rates.map((_, index) => index).filter((index) => index % every === 0);
    return {
      data: [...byStrategy, ring],
      layout: layout(80 + (size + 12) * workers.length, {
        xaxis: axis({
          title: D.inside ? "bandwidth inside the host" : "bandwidth of every host",
          range: [-0.6, rates.length - 0.4],
          tickvals: ticks,
          ticktext: ticks.map((index) => esc(labels.get(rates[index]))),
          showgrid: false,
        }),
        yaxis: axis({
          title: "workers",
          range: [-0.6, workers.length - 0.4],
          tickvals: workers.map((_, index) => index),
          ticktext: workers.map(count),
          showgrid: false,
        }),
      }),
    };
  }

  // Time against loss

  const spread = (middles, lows, highs) => ({
    type: "data",
    symmetric: false,
    array: highs.map((high, index) => Math.max(0, high - middles[index])),
    arrayminus: lows.map((low, index) => Math.max(0, middles[index] - low)),
    color: colour("muted"),
    thickness: 1,
    width: 3,
  });

  function frontierFigure(name) {
    const points = D.points.filter(stage.isShown);
    if (!points.length) return null;
    const unit = timeUnit(Math.min(...points.map((point) => point.seconds)));
    const time = (value) => value / unit[1];
    const x = points.map((point) => 100 * point.gap);
    const y = points.map((point) => time(point.seconds));
    const best = points.filter((point) => point.frontier).sort((a, b) => a.gap - b.gap || b.seconds - a.seconds);
    const ticks = logTicks([...y, ...points.map((point) => time(point.high_s)), ...points.map((point) => time(point.low_s))]);
    const words = (point) =>
      hover(
        point,
        `${duration(point.seconds, unit)}, between ${duration(point.low_s, unit)} and ${duration(point.high_s, unit)}`,
        wrapped(point.why),
      );
    return {
      data: [
        {
          type: "scatter",
          mode: "lines",
          name: "not beaten in both",
          x: best.map((point) => 100 * point.gap),
          y: best.map((point) => time(point.seconds)),
          line: { color: colour("muted"), width: 1.5, dash: "dot" },
          hoverinfo: "skip",
        },
        {
          type: "scatter",
          mode: "markers",
          x,
          y,
          error_x: spread(x, points.map((point) => 100 * point.gap_low), points.map((point) => 100 * point.gap_high)),
          error_y: spread(y, points.map((point) => time(point.low_s)), points.map((point) => time(point.high_s))),
          marker: { symbol: points.map((point) => strategyOf(point).symbol), size: 12, color: points.map(inkOf) },
          hovertemplate: points.map(words),
          showlegend: false,
          cliponaxis: false,
        },
      ],
      layout: layout(isNarrow(name) ? 360 : 460, {
        xaxis: axis({ title: "loss above plain DDP's at equal steps (%)", rangemode: "tozero" }),
        yaxis: axis({
          title: `time to plain DDP's loss (${unit[0]}, logarithmic)`,
          type: "log",
          tickvals: ticks,
          ticktext: ticks.map((value) => String(Number(value.toPrecision(2)))),
        }),
      }),
    };
  }

  stage.open({ map: mapFigure, frontier: frontierFigure }, () => {}, () => false);
})();
