// Draws the figures of a page about simulations from the JSON document in #data; sweep_page.py says what it holds.
"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");
  const CLEAR = "rgba(0,0,0,0)";
  const state = { bandwidth: 0, workers: 0, hidden: new Set() };

  // Words and numbers

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  // Plotly reads a little HTML in texts, so what was typed is escaped.
  const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const ms = (value) => (value >= 100 ? Math.round(value).toLocaleString("en-US") : value.toPrecision(3));
  const count = (value) => Math.round(value).toLocaleString("en-US");
  const percent = (value) => `${Math.round(100 * value)} %`;
  const timeUnit = (most) => (most >= 3 * 3600 ? ["h", 3600] : most >= 180 ? ["min", 60] : ["s", 1]);
  // Plotly breaks no lines by itself.
  const wrapped = (text, width = 48) => {
    const lines = [""];
    for (const word of text.split(/(?<= )/)) {
      if (lines.at(-1) && lines.at(-1).length + word.length > width) lines.push("");
      lines[lines.length - 1] += word;
    }
    return lines.map(esc).join("<br>");
  };
  const of = (row) => D.strategies[row.strategy];
  const where = (row) => `${D.workers[row.workers]} workers, ${D.bandwidths[row.bandwidth].label}`;
  const hover = (row, ...lines) =>
    [`<b>${esc(of(row).name)}</b>`, where(row), ...lines, wrapped(row.why)].join("<br>") + "<extra></extra>";
  const square = (row) => `<span style="color:${colour(of(row).colour)}">■</span>`;

  // What is shown

  const shown = (...keys) =>
    D.rows
      .filter((row) => !state.hidden.has(row.strategy) && keys.every((key) => row[key] === state[key]))
      .sort((a, b) => a.strategy - b.strategy);
  const width = (name) => document.getElementById(name).parentElement.clientWidth;
  const isNarrow = (name) => width(name) < 560;
  const tags = {
    bandwidth: () => (D.bandwidths.length > 1 ? D.bandwidths[state.bandwidth].label : ""),
    workers: () => (D.workers.length > 1 ? `${D.workers[state.workers]} workers` : ""),
  };

  // Looks that all figures share

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

  // Lines against workers or bandwidth

  function curves(rows, along, x, y, words) {
    const lines = new Map();
    for (const row of rows) lines.set(row.strategy, [...(lines.get(row.strategy) || []), row]);
    return [...lines.values()].map((points) => {
      points.sort((a, b) => a[along] - b[along]);
      const ink = colour(of(points[0]).colour);
      return {
        type: "scatter",
        mode: "lines+markers",
        name: esc(of(points[0]).name),
        x: points.map(x),
        y: points.map(y),
        line: { color: ink, width: 2 },
        marker: { symbol: of(points[0]).symbol, size: 9, color: ink },
        hovertemplate: points.map((row) => hover(row, ...words(row))),
        cliponaxis: false,
      };
    });
  }
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
    const words = (row) => [`${count(row.samples_per_s)} samples/s, efficiency ${percent(row.efficiency)}`];
    const values = rows.map((row) => row.samples_per_s);
    const ticks = logTicks([...values, best * D.workers.at(-1)]);
    return {
      data: [
        dotted(D.workers, D.workers.map((number) => number * best)),
        ...curves(rows, "workers", atWorkers, (row) => row.samples_per_s, words),
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
    const words = (row) => [`efficiency ${percent(row.efficiency)}, step ${ms(row.step_ms)} ms`];
    const high = Math.max(1, ...rows.map((row) => row.efficiency));
    return {
      data: curves(rows, "workers", atWorkers, (row) => row.efficiency, words),
      layout: layout(isNarrow(name) ? 320 : 380, {
        xaxis: valuesAxis("workers (logarithmic)", D.workers, D.workers.map(count), width(name) - 90),
        yaxis: axis({ title: "efficiency", range: [0, high * 1.04], tickformat: ".0%" }),
      }),
    };
  }

  function stepBandwidthFigure(name) {
    const rows = shown("workers");
    if (!rows.length) return null;
    const words = (row) => [`step ${ms(row.step_ms)} ms, exposed ${ms(row.exposed_ms)} ms`];
    const compute = Math.min(...rows.map((row) => row.compute_ms));
    const ticks = logTicks([compute, ...rows.map((row) => row.step_ms)]);
    const bps = D.bandwidths.map((bandwidth) => bandwidth.bps);
    const labels = D.bandwidths.map((bandwidth) => bandwidth.label);
    return {
      data: [
        dotted([bps[0], bps.at(-1)], [compute, compute]),
        ...curves(rows, "bandwidth", atBandwidth, (row) => row.step_ms, words),
      ],
      layout: layout(isNarrow(name) ? 340 : 430, {
        xaxis: valuesAxis("bandwidth of every host (logarithmic)", bps, labels, width(name) - 90),
        yaxis: axis({ title: "step (ms, logarithmic)", type: "log", tickvals: ticks, ticktext: ticks.map(ms) }),
      }),
    };
  }

  // Rows of bars with a label each: to the left, or above where the page is narrow

  const ROW = 30;
  const NAME = 20;

  function rowPlaces(name, rows) {
    const narrow = isNarrow(name);
    const places = { y: [], names: [], height: 0, narrow };
    for (const row of rows) {
      if (narrow) {
        const at = { xref: "paper", x: 0, xshift: -3, xanchor: "left", y: places.height + NAME / 2, yanchor: "middle" };
        const font = { size: 12, color: colour("text") };
        places.names.push(note(`${square(row)} ${esc(of(row).name)}`, { ...at, font }));
        places.height += NAME;
      }
      places.y.push(places.height + ROW / 2);
      places.height += ROW;
    }
    places.height += 4;
    return places;
  }
  const rowsLayout = (rows, places, xaxis) =>
    layout(places.height + 62, {
      xaxis,
      yaxis: axis({
        range: [places.height, 0],
        fixedrange: true,
        showgrid: false,
        ticks: "",
        showticklabels: !places.narrow,
        automargin: !places.narrow,
        tickvals: places.y,
        ticktext: rows.map((row) => `${esc(of(row).name)} ${square(row)} `),
        tickfont: { color: colour("text"), size: 13 },
      }),
      annotations: places.names,
    });
  const texts = (x, y, text) => ({
    type: "scatter",
    mode: "text",
    x,
    y,
    // Plotly drops ordinary spaces at the ends.
    text: text.map((words) => `\u00a0\u00a0\u00a0${words}`),
    textposition: "middle right",
    textfont: { color: colour("text"), size: 12 },
    cliponaxis: false,
    hoverinfo: "skip",
    showlegend: false,
  });
  const whiskers = (middles, lows, highs, y, ink) => ({
    type: "scatter",
    mode: "markers",
    x: middles,
    y,
    marker: { size: 0.1, color: CLEAR },
    error_x: {
      type: "data",
      symmetric: false,
      array: highs.map((high, index) => Math.max(0, high - middles[index])),
      arrayminus: lows.map((low, index) => Math.max(0, middles[index] - low)),
      color: ink,
      thickness: 1.4,
      width: 4,
    },
    hoverinfo: "skip",
    showlegend: false,
  });
  // The numbers beyond the bars need about 90 pixels.
  const reach = (most, name, narrow) => [0, most * (narrow ? 1.3 : width(name) < 800 ? 1.24 : 1.12)];

  function stepFigure(name) {
    const rows = shown("bandwidth", "workers");
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const parts = [
      ["compute_ms", "compute", "computing"],
      ["exposed_ms", "exposed", "waiting for communication"],
    ];
    const words = rows.map((row) =>
      hover(row, `step ${ms(row.step_ms)} ms`, ...parts.map(([key, , what]) => `${what} ${ms(row[key])} ms`)),
    );
    const ends = rows.map(() => 0);
    const data = parts.map(([key, ink, what]) => {
      const base = [...ends];
      const x = rows.map((row) => row[key]);
      x.forEach((part, index) => (ends[index] += part));
      const looks = { width: 19, marker: { color: colour(ink), line: { width: 0 } }, hovertemplate: words };
      return { type: "bar", orientation: "h", name: what, x, base, y: places.y, ...looks };
    });
    const noisy = rows.map((row) => row.spread_ms || [row.step_ms, row.step_ms, row.step_ms]);
    if (rows.some((row) => row.spread_ms)) {
      const part = (index) => noisy.map((spread) => spread[index]);
      data.push(whiskers(part(1), part(0), part(2), places.y, colour("text")));
    }
    const tips = rows.map((row, index) => Math.max(row.step_ms, noisy[index][2]));
    data.push(texts(tips, places.y, rows.map((row) => `${ms(row.step_ms)} ms`)));
    const range = reach(Math.max(...tips), name, places.narrow);
    return {
      data,
      layout: rowsLayout(rows, places, axis({ title: "time of a step (ms)", range, tickformat: "," })),
      key: parts.map(([, ink, what]) => [ink, what]),
    };
  }

  function targetFigure(name) {
    const here = shown("bandwidth", "workers");
    const rows = here.filter((row) => row.target_s);
    const missing = here.filter((row) => !row.target_s).map((row) => of(row).name);
    const aside = missing.length ? `Not shown: ${missing.join(", ")} - not measured.` : "";
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const highs = rows.map((row) => row.target_s[2]);
    const [unit, factor] = timeUnit(Math.max(...highs));
    const scaled = (index) => rows.map((row) => row.target_s[index] / factor);
    const inks = rows.map((row) => colour(of(row).colour));
    const time = (value) => `${(value / factor).toFixed(1)} ${unit}`;
    const words = rows.map(({ target_s: [middle, low, high], ...row }) =>
      hover(row, `${time(middle)}, between ${time(low)} and ${time(high)}`),
    );
    const data = [
      whiskers(scaled(0), scaled(1), scaled(2), places.y, colour("text")),
      {
        type: "scatter",
        mode: "markers",
        x: scaled(0),
        y: places.y,
        marker: { symbol: rows.map((row) => of(row).symbol), size: 12, color: inks },
        hovertemplate: words,
        cliponaxis: false,
      },
      texts(scaled(2), places.y, rows.map((row) => time(row.target_s[0]))),
    ];
    const range = reach(Math.max(...highs) / factor, name, places.narrow);
    return { data, layout: rowsLayout(rows, places, axis({ title: `time (${unit})`, range, tickformat: "," })), aside };
  }

  const FIGURES = {
    throughput: [throughputFigure, ["bandwidth"]],
    efficiency: [efficiencyFigure, ["bandwidth"]],
    "step-bandwidth": [stepBandwidthFigure, ["workers"]],
    "step-time": [stepFigure, ["workers", "bandwidth"]],
    target: [targetFigure, ["workers", "bandwidth"]],
  };
  const drawn = {};

  function draw(name) {
    const plot = document.getElementById(name);
    if (!plot) return;
    const [make, fixed] = FIGURES[name];
    const figure = make(name);
    plot.hidden = figure === null;
    const key = document.getElementById(`${name}-key`);
    key.replaceChildren();
    for (const [ink, words] of (figure && figure.key) || []) {
      const entry = document.createElement("span");
      const patch = document.createElement("i");
      patch.style.setProperty("--ink", `var(--${ink})`);
      entry.append(patch, words);
      key.append(entry);
    }
    const tag = document.querySelector(`[data-tag="${name}"]`);
    tag.textContent = fixed.map((which) => tags[which]()).filter(Boolean).join(", ");
    tag.hidden = !tag.textContent;
    const aside = document.getElementById(`${name}-aside`);
    aside.textContent = figure === null ? "There is nothing to show for this choice." : figure.aside || "";
    aside.hidden = !aside.textContent;
    if (figure === null) return;
    drawn[name] = figure;
    const printed = root.classList.contains("printing") ? { autosize: false, width: Math.min(width(name), 690) } : {};
    const options = { responsive: true, displayModeBar: false, showTips: false };
    Plotly.react(plot, figure.data, { ...figure.layout, ...printed }, options);
  }

  function drawAll() {
    for (const name of Object.keys(FIGURES)) draw(name);
  }

  // The page's legend is not part of a figure, so a saved one gets a legend of its own.
  function save(name) {
    const heading = document.getElementById(`${name}-heading`);
    const text = heading.textContent.trim().replace(/\s+/g, " ");
    const { data, layout: own } = drawn[name];
    const size = { width: 1200, height: own.height + 170 };
    const saved = {
      ...own,
      ...size,
      autosize: false,
      showlegend: true,
      paper_bgcolor: colour("page"),
      margin: { l: 40, r: 40, t: 70, b: 90 },
      title: { text: esc(text), font: { size: 18, color: colour("text") }, x: 0.03, xanchor: "left" },
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { color: colour("text") } },
    };
    const file = { ...size, format: "png", scale: 2, filename: `laconic-${name}` };
    return Plotly.downloadImage({ data, layout: saved }, file);
  }

  // Controls

  function refresh() {
    for (const block of document.querySelectorAll(".table-block")) {
      const isHere = (key) => Number(block.dataset[key]) === state[key];
      block.hidden = !isHere("bandwidth") || !isHere("workers");
    }
    for (const row of document.querySelectorAll("[data-strategy-row]")) {
      row.hidden = state.hidden.has(Number(row.dataset.strategyRow));
    }
    document.getElementById("show-all").hidden = !state.hidden.size;
    drawAll();
  }

  for (const button of document.querySelectorAll("button[data-strategy]")) {
    button.addEventListener("click", () => {
      const number = Number(button.dataset.strategy);
      if (!state.hidden.delete(number)) state.hidden.add(number);
      button.setAttribute("aria-pressed", String(!state.hidden.has(number)));
      refresh();
    });
  }
  document.getElementById("show-all").addEventListener("click", () => {
    state.hidden.clear();
    for (const button of document.querySelectorAll(".chip[aria-pressed]")) button.setAttribute("aria-pressed", "true");
    refresh();
  });
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => save(button.dataset.save));
  }
  for (const key of ["bandwidth", "workers"]) {
    for (const radio of document.querySelectorAll(`input[name=${key}]`)) {
      // A browser may remember the choice of an earlier visit.
      if (radio.checked) state[key] = Number(radio.value);
      radio.addEventListener("change", () => {
        state[key] = Number(radio.value);
        refresh();
      });
    }
  }

  refresh();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let lastWidth = innerWidth;
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (innerWidth !== lastWidth) drawAll();
      lastWidth = innerWidth;
    }, 150);
  });
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    drawAll();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    drawAll();
  });
})();
