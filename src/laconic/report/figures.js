// The parts that figures are built of, for every page: names and inks, axes and layouts, curves, rows of bars.
//
// They read the JSON document in #data, of which they need strategies and, where there are several, runs.
"use strict";
const figures = (() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  // How the lines of a run are broken: in plotly's words, and as SVG's stroke-dasharray.
  const DASHES = [
    ["solid", ""],
    ["dash", "7 4"],
    ["dot", "2 3"],
    ["dashdot", "7 3 2 3"],
    ["longdash", "11 4"],
    ["longdashdot", "11 3 2 3"],
  ];
  const CLEAR = "rgba(0,0,0,0)";
  const runs = D.runs || [];
  const several = runs.length > 1;

  // Names and inks

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  // Plotly reads a little HTML in texts, so names and messages are escaped.
  const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // Plotly breaks no lines by itself.
  const wrapped = (text, width = 48) => {
    const lines = [""];
    for (const word of text.split(/(?<= )/)) {
      if (lines.at(-1) && lines.at(-1).length + word.length > width) lines.push("");
      lines[lines.length - 1] += word;
    }
    return lines.map(esc).join("<br>");
  };
  const strategyOf = (item) => D.strategies[item.strategy];
  const nameOf = (item) => esc(strategyOf(item).name);
  const inkOf = (item) => colour(strategyOf(item).colour);
  const letter = (item) => (several ? ` ${esc(runs[item.run].letter)}` : "");
  const square = (item) => `<span style="color:${inkOf(item)}">■</span>`;
  const dashOf = (run) => DASHES[run % DASHES.length];
  const line = (item) => ({ color: inkOf(item), dash: dashOf(item.run || 0)[0] });
  const hover = (item, ...lines) => [`<b>${nameOf(item)}</b>`, ...lines].join("<br>") + "<extra></extra>";

  // Looks that all figures share

  const width = (name) => document.getElementById(name).parentElement.clientWidth;
  const isNarrow = (name) => width(name) < 560;
  const axis = (more) => ({
    gridcolor: colour("grid"),
    zeroline: false,
    linecolor: colour("line"),
    tickcolor: colour("line"),
    tickfont: { color: colour("muted"), size: 12 },
    automargin: true,
    // A finger that drags wants to scroll the page.
    fixedrange: matchMedia("(pointer: coarse)").matches,
    ...more,
    title: { text: more.title || "", font: { color: colour("muted"), size: 13 }, standoff: 10 },
  });
  const layout = (height, more) => ({
    height,
    autosize: true,
    showlegend: false,
    hovermode: "closest",
    hoverdistance: 24,
    dragmode: "zoom",
    barmode: "overlay",
    bargap: 0,
    margin: { l: 8, r: 16, t: 12, b: 8 },
    paper_bgcolor: CLEAR,
    plot_bgcolor: CLEAR,
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 13 },
    hoverlabel: {
      bgcolor: colour("card"),
      bordercolor: colour("line"),
      font: { color: colour("text"), size: 12 },
      align: "left",
      namelength: -1,
    },
    ...more,
  });
  const note = (text, more) => ({ text, showarrow: false, font: { color: colour("muted"), size: 12 }, ...more });
  // Round numbers in every decade: as many as there is room for.
  const DIGITS = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1]];
  const logTicks = (values, most = 10) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) powers.push(power);
    const ticks = DIGITS.map((digits) =>
      powers
        .flatMap((power) => digits.map((digit) => digit * 10 ** power))
        .filter((value) => value >= low / 1.5 && value <= high * 1.5),
    );
    return ticks.find((found) => found.length <= most) || ticks.at(-1);
  };
  const atLeft = (y) => ({ xref: "paper", x: 0, xshift: -3, xanchor: "left", y, yanchor: "middle" });
  // A vertical axis in pixels, downwards: lanes and rows stand where they are put.
  const pixelAxis = (range, isLabelled, more) =>
    axis({
      range,
      fixedrange: true,
      showgrid: false,
      ticks: "",
      showticklabels: isLabelled,
      automargin: isLabelled,
      ...more,
    });

  // Curves: one for each strategy and run, through its rows in the order of one of their keys

  function curves(rows, along, x, y, words) {
    const found = new Map();
    for (const row of rows) {
      const which = `${row.strategy} ${row.run}`;
      found.set(which, [...(found.get(which) || []), row]);
    }
    return [...found.values()].map((points) => {
      points.sort((a, b) => a[along] - b[along]);
      const [first] = points;
      return {
        type: "scatter",
        mode: "lines+markers",
        name: nameOf(first) + letter(first),
        x: points.map(x),
        y: points.map(y),
        line: { ...line(first), width: 2 },
        marker: { symbol: strategyOf(first).symbol, size: 9, color: inkOf(first) },
        hovertemplate: points.map(words),
        cliponaxis: false,
      };
    });
  }

  // Rows of bars or marks with a label each: to the left, or above where the page is narrow

  const ROW = 30;
  const ROW_OF_SEVERAL = 24;
  const NAME = 20;
  const GROUP = 12;

  // Places in pixels; the rows of a strategy (one per run) stand together and are named once.
  function rowPlaces(name, rows) {
    const narrow = isNarrow(name);
    const places = { y: [], ticks: [], names: [], height: 0, narrow };
    rows.forEach((row, index) => {
      const isFirst = index === 0 || rows[index - 1].strategy !== row.strategy;
      if (isFirst && index && several) places.height += GROUP;
      if (isFirst && narrow) {
        const font = { size: 12, color: colour("text") };
        places.names.push(note(`${square(row)} ${nameOf(row)}`, { ...atLeft(places.height + NAME / 2), font }));
        places.height += NAME;
      }
      places.y.push(places.height + ROW / 2);
      places.height += several ? ROW_OF_SEVERAL : ROW;
      const own = isFirst && !narrow ? `${nameOf(row)} ${square(row)}` : "";
      places.ticks.push(`${own}${letter(row)} `);
    });
    places.height += 4;
    return places;
  }

  const rowsLayout = (places, xaxis) =>
    layout(places.height + 62, {
      xaxis,
      yaxis: pixelAxis([places.height, 0], !places.narrow || several, {
        tickvals: places.y,
        ticktext: places.ticks,
        tickfont: { color: colour("text"), size: 13 },
      }),
      annotations: places.names,
    });

  const texts = (x, y, text, textposition = "middle right") => ({
    type: "scatter",
    mode: "text",
    x,
    y,
    // Plotly drops ordinary spaces at the ends.
    text: text.map((words) => `\u00a0\u00a0\u00a0${words}\u00a0\u00a0\u00a0`),
    textposition,
    textfont: { color: colour("text"), size: 12 },
    cliponaxis: false,
    hoverinfo: "skip",
    showlegend: false,
  });

  // spreads: [low, middle, high] of every row.
  const whiskers = (spreads, y) => ({
    type: "scatter",
    mode: "markers",
    x: spreads.map(([, middle]) => middle),
    y,
    marker: { size: 0.1, color: CLEAR },
    error_x: {
      type: "data",
      symmetric: false,
      array: spreads.map(([, middle, high]) => Math.max(0, high - middle)),
      arrayminus: spreads.map(([low, middle]) => Math.max(0, middle - low)),
      color: colour("text"),
      thickness: 1.2,
      width: 3,
    },
    hoverinfo: "skip",
    showlegend: false,
  });

  // The numbers beyond the marks need about 90 pixels.
  const valueAxis = (name, title, most, narrow) => {
    const range = [0, most * (narrow ? 1.3 : width(name) < 800 ? 1.24 : 1.12)];
    return axis({ title, range, tickformat: "," });
  };

  // Where the time of a step goes: computing, and the parts a page adds, each [key of a row, ink, words].
  // spread: a row's [low, middle, high] or null.
  function stepTimes(name, rows, parts, spread, words) {
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const all = [["compute_ms", "compute", "computing"], ...parts];
    const shown = all.filter(([key]) => rows.some((row) => row[key] > 0));
    const hovertemplate = rows.map((row) => words(row, shown));
    const ends = rows.map(() => 0);
    const data = shown.map(([key, ink, what]) => {
      const base = [...ends];
      const x = rows.map((row) => Math.max(0, row[key]));
      x.forEach((part, index) => (ends[index] += part));
      const looks = { width: 19, marker: { color: colour(ink), line: { width: 0 } }, hovertemplate };
      return { type: "bar", orientation: "h", name: what, x, base, y: places.y, ...looks };
    });
    const steps = rows.map((row) => row.step_ms);
    const spreads = rows.map((row) => spread(row) || [row.step_ms, row.step_ms, row.step_ms]);
    if (rows.some(spread)) data.push(whiskers(spreads, places.y));
    const tips = steps.map((step, index) => Math.max(step, spreads[index][2]));
    data.push(texts(tips, places.y, steps.map((step) => `${units.ms(step)} ms`)));
    return {
      data,
      layout: rowsLayout(places, valueAxis(name, "time of a step (ms)", Math.max(...tips), places.narrow)),
      key: shown.map(([, ink, what]) => [ink, what]),
    };
  }

  const wordsAndInks = { colour, esc, wrapped, strategyOf, nameOf, inkOf, letter, square, dashOf, line, hover };
  const looks = { width, isNarrow, axis, pixelAxis, layout, logTicks, note, atLeft };
  const rowsOfMarks = { rowPlaces, rowsLayout, texts, whiskers, valueAxis, stepTimes };
  return { D, several, ...wordsAndInks, ...looks, ...rowsOfMarks, curves };
})();
