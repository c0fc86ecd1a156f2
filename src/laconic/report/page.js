// Draws the figures of the page from the JSON document in #data (drawing.py says what it holds).
"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const DASH_ARRAYS = ["", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3"];
  const CLEAR = "rgba(0,0,0,0)";
  const several = D.runs.length > 1;
  const state = { place: 0, hiddenStrategies: new Set(), hiddenRuns: new Set(), run: 0, rank: "0" };

  // Words and numbers

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  // Plotly reads a little HTML in texts, so what comes from a run is escaped.
  const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const ms = (value) => (value >= 100 ? grouped(value) : value.toFixed(value >= 10 ? 1 : 2));
  const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const sizeUnit = (most, least = 1) => SIZES.find(([, factor]) => most >= least * factor) || SIZES[4];
  const bytes = (value) => {
    const [unit, factor] = sizeUnit(value);
    return `${(value / factor).toFixed(factor === 1 ? 0 : 1)} ${unit}`;
  };
  const timeUnit = (most) => (most >= 3 * 3600 ? ["h", 3600] : most >= 600 ? ["min", 60] : ["s", 1]);
  // Plotly breaks no lines by itself.
  const wrapped = (text, width = 48) => {
    const lines = [""];
    for (const word of text.split(/(?<= )/)) {
      if (lines.at(-1).length + word.length > width && lines.at(-1)) lines.push("");
      lines[lines.length - 1] += word;
    }
    return lines.map(esc).join("<br>");
  };
  const hover = (item, ...lines) => {
    const strategy = D.strategies[item.strategy];
    const full = strategy.text === strategy.name ? [] : [wrapped(strategy.text)];
    const run = several ? [`run ${esc(D.runs[item.run].letter)} ${esc(D.runs[item.run].label)}`] : [];
    return [`<b>${esc(strategy.name)}</b>`, ...full, ...run, ...lines].join("<br>") + "<extra></extra>";
  };
  const letter = (item) => (several ? ` ${esc(D.runs[item.run].letter)}` : "");
  const legendName = (item) => esc(D.strategies[item.strategy].name) + letter(item);
  const square = (item) => `<span style="color:${colour(D.strategies[item.strategy].colour)}">■</span>`;

  // What is shown

  const isShown = (item) => !state.hiddenStrategies.has(item.strategy) && !state.hiddenRuns.has(item.run);
  const here = (list) =>
    list
      .filter((item) => item.place === state.place && isShown(item))
      .sort((a, b) => a.strategy - b.strategy || a.run - b.run);
  const width = (name) => document.getElementById(name).parentElement.clientWidth;
  const isNarrow = (name) => width(name) < 560;

  // Looks that all figures share

  const axis = (more) => ({
    gridcolor: colour("grid"), zeroline: false, linecolor: colour("line"), tickcolor: colour("line"),
    tickfont: { color: colour("muted"), size: 12 }, automargin: true, fixedrange: matchMedia("(pointer: coarse)").matches,
    ...more, title: { text: more.title || "", font: { color: colour("muted"), size: 13 }, standoff: 10 },
  });
  const layout = (height, more) => ({
    height, autosize: true, showlegend: false, hovermode: "closest", hoverdistance: 24, dragmode: "zoom",
    margin: { l: 8, r: 12, t: 12, b: 8 }, paper_bgcolor: CLEAR, plot_bgcolor: CLEAR,
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif", color: colour("text"), size: 13 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 }, align: "left", namelength: -1 },
    barmode: "overlay", bargap: 0, ...more,
  });
  const line = (item) => ({ color: colour(D.strategies[item.strategy].colour), dash: DASHES[item.run % DASHES.length] });

  // Loss

  // A mean over the last steps: single batches are noise.
  const smooth = (values, window) => {
    let sum = 0;
    let num = 0;
    return values.map((value, index) => {
      if (value !== null) { sum += value; num += 1; }
      const gone = index >= window ? values[index - window] : null;
      if (gone !== null) { sum -= gone; num -= 1; }
      return value === null || !num ? null : sum / num;
    });
  };
  const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

  function lossFigure(name, key, axisTitle, unitFor, inWords) {
    const curves = here(D.curves).filter((curve) => curve.loss.length && curve[key].length);
    if (!curves.length) return null;
    const lasts = curves.map((curve) => curve[key].at(-1));
    const most = Math.max(...lasts);
    const isLog = key === "bytes" && most > 20 * Math.min(...lasts);
    const [unit, factor] = unitFor(isLog ? Math.sqrt(most * Math.min(...lasts)) : most);
    const data = [];
    const seen = [];
    for (const curve of curves) {
      const x = curve[key].map((value) => value / factor);
      const window = Math.max(1, Math.round(curve.loss.length / 25));
      const y = smooth(curve.loss, window);
      seen.push(...y.slice(Math.floor(y.length / 50)).filter((value) => value !== null));
      if (window > 1 && curves.length <= 8) {
        data.push({ type: "scatter", x, y: curve.loss, mode: "lines", opacity: 0.2, hoverinfo: "skip", showlegend: false, line: { ...line(curve), width: 1, dash: "solid" } });
      }
      data.push({
        type: "scatter", x, y, mode: "lines+markers", line: { ...line(curve), width: 2.2 }, name: legendName(curve),
        marker: { symbol: D.strategies[curve.strategy].symbol, size: 8, maxdisplayed: 7, color: line(curve).color },
        customdata: curve.step.map((step, index) => [step, inWords(curve[key][index])]),
        hovertemplate: hover(curve, "loss %{y:.4f} after %{customdata[1]}", "step %{customdata[0]}"),
      });
    }
    seen.sort((a, b) => a - b);
    const targets = D.targets.filter((target) => curves.some((curve) => curve.run === target.run));
    const values = [...new Set(targets.map((target) => target.loss))];
    const low = Math.min(seen[0], ...values);
    // Early steps of one bad strategy must not flatten all the others.
    const high = Math.max(Math.min(seen.at(-1), low + 2.5 * (quantile(seen, 0.9) - low) || Infinity), ...values);
    const room = (high - low) * 0.06 || 0.1;
    return {
      data,
      layout: layout(isNarrow(name) ? 340 : 430, {
        xaxis: axis({ title: `${axisTitle} (${unit}${isLog ? ", logarithmic" : ""})`, type: isLog ? "log" : "linear", rangemode: "tozero", tickformat: ",", ...(isLog ? { dtick: 1 } : {}) }),
        yaxis: axis({ title: "loss", range: [low - room, high + room] }),
        shapes: values.map((value) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colour("muted"), width: 1, dash: "dot" } })),
        annotations: values.map((value) => ({ xref: "paper", x: 0, y: value, xanchor: "left", yanchor: "bottom", showarrow: false, text: `target ${+value.toFixed(4)}`, font: { color: colour("muted"), size: 12 } })),
      }),
      aside: missing(curves, key === "bytes" ? "nobody counted its bytes" : "it has no losses"),
    };
  }

  // Strategies of this link that a figure cannot show, so that nobody thinks they were forgotten.
  function missing(shown, why, rows = here(D.rows)) {
    const names = rows
      .filter((row) => !shown.some((item) => item.strategy === row.strategy && item.run === row.run))
      .map((row) => D.strategies[row.strategy].name + (several ? ` (${D.runs[row.run].letter})` : ""));
    return names.length ? `Not shown: ${[...new Set(names)].join(", ")} - ${why}.` : "";
  }

  // Rows of bars or marks with a label each: to the left, or above where the page is narrow

  const ROW = 30, BAR = 20, NAME = 20, GROUP = 12;

  // Places in pixels; the rows of a strategy (one per run) stand together and are named once.
  function rowPlaces(name, rows) {
    const narrow = isNarrow(name);
    const y = [];
    const names = [];
    let next = 0;
    rows.forEach((row, index) => {
      const isFirst = index === 0 || rows[index - 1].strategy !== row.strategy;
      if (isFirst && index && several) next += GROUP;
      if (isFirst && narrow) {
        names.push({
          xref: "paper", x: 0, y: next + NAME / 2, xanchor: "left", yanchor: "middle", showarrow: false, xshift: -3,
          text: `${square(row)} ${esc(D.strategies[row.strategy].name)}`, font: { size: 12, color: colour("text") },
        });
        next += NAME;
      }
      y.push(next + ROW / 2);
      next += several ? ROW - 6 : ROW;
    });
    const ticks = rows.map((row, index) => {
      const isFirst = index === 0 || rows[index - 1].strategy !== row.strategy;
      if (narrow) return several ? D.runs[row.run].letter : "";
      return `${isFirst ? `${esc(D.strategies[row.strategy].name)} ${square(row)}` : ""}${letter(row)} `;
    });
    return { y, names, ticks, height: next + 4, narrow };
  }

  const rowsLayout = (places, xaxis) =>
    layout(places.height + 62, {
      xaxis,
      yaxis: axis({
        range: [places.height, 0], fixedrange: true, showgrid: false, ticks: "", showticklabels: !places.narrow || several,
        automargin: !places.narrow || several, tickvals: places.y, ticktext: places.ticks, tickfont: { color: colour("text"), size: 13 },
      }),
      annotations: places.names,
    });

  function stepFigure(name) {
    const rows = here(D.rows);
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const y = places.y;
    const parts = [["compute_ms", "compute", "computing"], ["encode_ms", "encode", "encoding and decoding"], ["exposed_ms", "exposed", "waiting for the network"]];
    const used = parts.filter(([key]) => rows.some((row) => row[key] > 0));
    const base = rows.map(() => 0);
    const text = (row) =>
      hover(row, `step ${ms(row.step_ms)} ms (quartiles ${ms(row.low_ms)} to ${ms(row.high_ms)})`,
        ...used.map(([key, , words]) => `${words} ${ms(row[key])} ms (${Math.round((100 * row[key]) / row.step_ms)} %)`));
    const data = used.map(([key, ink, words]) => {
      const from = [...base];
      rows.forEach((row, index) => { base[index] += Math.max(0, row[key]); });
      return {
        type: "bar", orientation: "h", y, x: rows.map((row) => Math.max(0, row[key])), base: from, width: several ? BAR - 2 : BAR, name: words,
        marker: { color: colour(ink), line: { width: 0 } }, hovertemplate: rows.map(text),
      };
    });
    const most = Math.max(...rows.map((row) => row.high_ms));
    data.push({
      type: "scatter", mode: "markers", x: rows.map((row) => row.step_ms), y, marker: { size: 0.1, color: CLEAR }, hoverinfo: "skip", showlegend: false,
      error_x: { type: "data", symmetric: false, array: rows.map((row) => Math.max(0, row.high_ms - row.step_ms)), arrayminus: rows.map((row) => Math.max(0, row.step_ms - row.low_ms)), color: colour("text"), thickness: 1.2, width: 3 },
    });
    data.push({
      type: "scatter", mode: "text", x: rows.map((row) => Math.max(row.step_ms, row.high_ms)), y, text: rows.map((row) => `  ${ms(row.step_ms)} ms`),
      textposition: "middle right", textfont: { color: colour("text"), size: 12 }, cliponaxis: false, hoverinfo: "skip", showlegend: false,
    });
    return {
      data,
      layout: rowsLayout(places, axis({ title: "time of a step (ms)", range: [0, most * (isNarrow(name) ? 1.28 : 1.12)], tickformat: ",", side: "bottom" })),
      key: used.map(([, ink, words]) => [ink, words]),
    };
  }

  function bytesFigure(name) {
    const rows = here(D.rows).filter((row) => row.wire_bytes !== null || row.predicted_bytes !== null);
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const y = places.y;
    const kernel = rows.map((row) => (row.source === "kernel" ? row.wire_bytes : null));
    const counted = rows.map((row) => (row.counted_bytes !== null ? row.counted_bytes : row.source === "transport" ? row.wire_bytes : null));
    const predicted = rows.map((row) => row.predicted_bytes);
    const all = [...kernel, ...counted, ...predicted].filter((value) => value);
    if (!all.length) return null;
    const isLog = Math.max(...all) > 20 * Math.min(...all);
    const [unit, factor] = sizeUnit(isLog ? Math.sqrt(Math.max(...all) * Math.min(...all)) : Math.max(...all));
    const inks = rows.map((row) => colour(D.strategies[row.strategy].colour));
    const words = (row, index) =>
      hover(row, predicted[index] !== null ? `predicted ${bytes(predicted[index])}` : "not predicted",
        ...(counted[index] !== null ? [`counted by laconic's transport ${bytes(counted[index])}`] : []),
        ...(kernel[index] !== null ? [`counted by the kernel, with headers, ${bytes(kernel[index])}`] : []));
    const marks = [
      [kernel, "kernel", { symbol: "line-ns-open", size: 17, line: { width: 2.5, color: inks }, color: inks }],
      [counted, "transport", { symbol: "circle", size: 8, color: inks }],
      [predicted, "predicted", { symbol: "diamond-open", size: 14, line: { width: 2 }, color: inks }],
    ].filter(([values]) => values.some((value) => value !== null));
    const data = marks.map(([values, mark, marker]) => ({
      type: "scatter", mode: "markers", y, x: values.map((value) => (value === null ? null : value / factor)), marker,
      hovertemplate: rows.map(words), cliponaxis: false, name: mark === "predicted" ? mark : `counted by the ${mark}`,
    }));
    const furthest = rows.map((_, index) => Math.max(kernel[index] || 0, counted[index] || 0, predicted[index] || 0));
    const beyond = (row, index) => {
      if (row.wire_bytes === null) return `  predicted ${bytes(predicted[index])}`;
      if (!predicted[index]) return `  ${bytes(row.wire_bytes)}`;
      const percent = 100 * (row.wire_bytes / predicted[index] - 1);
      return `  ${bytes(row.wire_bytes)} (${Math.abs(percent) < 0.05 ? "as predicted" : `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(1)} %`})`;
    };
    data.push({
      type: "scatter", mode: "text", y, x: furthest.map((value) => value / factor), text: rows.map(beyond),
      textposition: "middle right", textfont: { color: colour("text"), size: 12 }, cliponaxis: false, hoverinfo: "skip", showlegend: false,
    });
    const most = Math.max(...all) / factor;
    const least = Math.min(...all) / factor;
    const room = isNarrow(name) ? 1.6 : 1.22;
    const range = isLog ? [Math.log10(least) - 0.15, Math.log10(least) + (Math.log10(most) - Math.log10(least)) * room + 0.1] : [0, most * room];
    const symbols = {
      kernel: ["M7 0V12", "counted by the kernel, headers included"],
      transport: ["M7 3a3 3 0 1 0 .01 0z", "counted by laconic's transport"],
      predicted: ["M7 1L12 6L7 11L2 6Z", "predicted"],
    };
    return {
      data,
      layout: rowsLayout(places, axis({ title: `sent by each rank per step (${unit}${isLog ? ", logarithmic" : ""})`, type: isLog ? "log" : "linear", range, ...(isLog ? { dtick: 1 } : {}) })),
      symbols: marks.map(([, mark]) => [...symbols[mark], mark === "transport"]),
    };
  }

  // Speed-up

  function speedupFigure(name) {
    const rows = D.rows.filter((row) => isShown(row) && row.speedup !== null && D.strategies[row.strategy].colour !== "ddp");
    if (!rows.length) return null;
    const lines = new Map();
    for (const row of rows) {
      const which = `${row.strategy} ${row.run}`;
      lines.set(which, [...(lines.get(which) || []), row]);
    }
    const data = [...lines.values()].map((points) => {
      points.sort((a, b) => a.place - b.place);
      return {
        type: "scatter", mode: "lines+markers", x: points.map((row) => row.place), y: points.map((row) => row.speedup),
        line: { ...line(points[0]), width: 2 }, name: legendName(points[0]), marker: { symbol: D.strategies[points[0].strategy].symbol, size: 9, color: line(points[0]).color },
        hovertemplate: points.map((row) => hover(row, `${row.speedup.toFixed(2)}x torch DDP on ${esc(D.places[row.place].label)}`, `step ${ms(row.step_ms)} ms`)),
        cliponaxis: false,
      };
    });
    const ticks = D.places.map((place) => (place.link === place.links ? esc(place.link) : `${esc(place.link)}<br>${esc(place.links)}`));
    return {
      data,
      layout: layout(isNarrow(name) ? 340 : 420, {
        xaxis: axis({ tickvals: D.places.map((_, index) => index), ticktext: ticks, range: [-0.2, D.places.length - 0.8], showgrid: false }),
        yaxis: axis({ title: "times as fast as torch DDP", rangemode: "tozero", ticksuffix: "x" }),
        shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, layer: "below", line: { color: colour("ddp"), width: 2 } }],
        annotations: isNarrow(name) ? [] : [{ xref: "paper", x: 1, y: 1, xanchor: "right", yanchor: "top", showarrow: false, text: "torch DDP", font: { color: colour("muted"), size: 12 } }],
      }),
    };
  }

  // Timeline: lanes with a height in pixels, block under block

  function timelineFigure(name) {
    const ofRun = here(D.timelines).filter((item) => item.run === state.run);
    const items = ofRun.filter((item) => item.ranks[state.rank]);
    if (!ofRun.length) return null;
    const TITLE = 22, TRAINING = 21, LANE = 8, GAP = 3, BLOCK = 16;
    const bars = D.kinds.map(() => ({ x: [], base: [], y: [], width: [], text: [], words: [] }));
    const titles = [];
    let y = 0;
    for (const item of items) {
      titles.push({
        xref: "paper", x: 0, y: y + TITLE / 2, xanchor: "left", yanchor: "middle", showarrow: false,
        xshift: -3, text: `${square(item)} ${esc(D.strategies[item.strategy].name)} <span style="color:${colour("muted")}">step ${item.step}, ${ms(item.ms)} ms</span>`, font: { size: 13, color: colour("text") },
      });
      y += TITLE;
      const spans = item.ranks[state.rank];
      const lanes = Math.max(-1, ...spans.map((span) => (D.kinds[span[0]] === "exchange" ? span[5] : -1))) + 1;
      const coding = y + TRAINING + GAP;
      const exchanging = coding + LANE + 1;
      for (const [kind, start, duration, bucket, sent, lane] of spans) {
        const what = D.kinds[kind];
        const bar = bars[kind];
        const height = kind <= 3 ? TRAINING : what === "exchange" ? LANE - 1 : LANE;
        const top = kind <= 3 ? y : what === "exchange" ? exchanging + lane * LANE : coding;
        bar.base.push(start);
        bar.x.push(duration);
        bar.y.push(top + height / 2);
        bar.width.push(height);
        bar.text.push(kind <= 3 ? what : "");
        bar.words.push(hover(item, `<b>${what}${bucket === null ? "" : ` of bucket ${bucket}`}</b> ${ms(duration)} ms`, `from ${ms(start)} to ${ms(start + duration)} ms`, ...(sent === null ? [] : [`sent ${bytes(sent)}`])));
      }
      y = (lanes ? exchanging + lanes * LANE : spans.some((span) => span[0] > 3) ? coding + LANE : y + TRAINING) + BLOCK;
    }
    // backward first, so that the waiting within it is drawn over it.
    const order = D.kinds.map((_, index) => index).sort((a, b) => (D.kinds[a] === "wait") - (D.kinds[b] === "wait"));
    const data = order.filter((kind) => bars[kind].x.length).map((kind) => ({
      type: "bar", orientation: "h", name: D.kinds[kind], x: bars[kind].x, base: bars[kind].base, y: bars[kind].y, width: bars[kind].width,
      // Encoding may take less than a pixel; a rim of its own colour keeps it visible.
      marker: { color: colour(D.kinds[kind]), line: { width: 0.8, color: colour(["encode", "decode"].includes(D.kinds[kind]) ? D.kinds[kind] : "page") } },
      text: bars[kind].text, textposition: kind <= 3 ? "inside" : "none", insidetextanchor: "middle", textangle: 0,
      textfont: { color: ["backward", "wait"].includes(D.kinds[kind]) ? "#ffffff" : colour("text"), size: 11 },
      hovertemplate: bars[kind].words,
    }));
    const most = Math.max(...items.map((item) => Math.max(item.ms, ...item.ranks[state.rank].filter((span) => span[0] <= 3).map((span) => span[1] + span[2]))));
    return {
      data,
      layout: layout(Math.max(y, 40) + 56, {
        uniformtext: { mode: "hide", minsize: 10 },
        xaxis: axis({ title: "since the step began (ms)", range: [0, most * 1.01], tickformat: "," }),
        yaxis: axis({ range: [Math.max(y, 40), -4], showgrid: false, showticklabels: false, ticks: "", fixedrange: true, automargin: false }),
        annotations: titles,
      }),
      key: D.kinds.filter((_, kind) => bars[kind].x.length).map((kind) => [kind, kind === "wait" ? "waiting for exchanges" : kind]),
      aside: missing(items, "no details of its steps were recorded", here(D.rows).filter((row) => row.run === state.run)),
    };
  }

  const drawn = {};
  const FIGURES = {
    "loss-time": (name) => lossFigure(name, "seconds", "training time", timeUnit, (value) => { const [unit, factor] = timeUnit(value); return `${(value / factor).toFixed(1)} ${unit}`; }),
    "loss-bytes": (name) => lossFigure(name, "bytes", "sent by each rank", (most) => sizeUnit(most, 2), bytes),
    "step-time": stepFigure,
    speedup: speedupFigure,
    timeline: timelineFigure,
    bytes: bytesFigure,
  };

  function showKey(name, figure) {
    const key = document.getElementById(`${name}-key`);
    key.replaceChildren();
    for (const [ink, words] of figure.key || []) {
      const entry = document.createElement("span");
      const patch = document.createElement("i");
      patch.style.setProperty("--ink", `var(--${ink})`);
      entry.append(patch, words);
      key.append(entry);
    }
    for (const [path, words, filled] of figure.symbols || []) {
      const entry = document.createElement("span");
      entry.innerHTML = `<svg width="14" height="12" aria-hidden="true"><path d="${path}" stroke="currentColor" stroke-width="2" fill="${filled ? "currentColor" : "none"}"/></svg>`;
      entry.append(words);
      key.append(entry);
    }
  }

  function draw(name) {
    const plot = document.getElementById(name);
    if (!plot) return;
    const section = document.getElementById(`${name}-section`);
    section.hidden = false;
    const figure = FIGURES[name](name);
    section.hidden = figure === null;
    if (figure === null) return;
    showKey(name, figure);
    const aside = document.getElementById(`${name}-aside`);
    aside.textContent = figure.aside || "";
    aside.hidden = !figure.aside;
    drawn[name] = figure;
    if (root.classList.contains("printing")) figure.layout = { ...figure.layout, autosize: false, width: Math.min(width(name), 690) };
    Plotly.react(plot, figure.data, figure.layout, {
      responsive: true, displayModeBar: false, showTips: false,
    });
  }

  // The page's own legend is not part of a figure, so a saved one gets plotly's.
  function save(name) {
    const heading = document.getElementById(`${name}-section`).querySelector("h2").innerText.replace(/\s+/g, " ");
    const { data, layout } = drawn[name];
    const legend = { orientation: "h", y: -0.12, yanchor: "top", yref: "paper", x: 0, font: { color: colour("text") } };
    const margin = { l: 40, r: 40, t: 70, b: 40 };
    const title = { text: esc(heading), font: { size: 18, color: colour("text") }, x: 0.03, xanchor: "left" };
    const saved = { ...layout, width: 1200, height: layout.height + 160, autosize: false, showlegend: true, legend, margin, title, paper_bgcolor: colour("page") };
    return Plotly.downloadImage({ data, layout: saved }, { format: "png", scale: 2, width: 1200, height: saved.height, filename: `laconic-${name}` });
  }

  function drawAll() {
    for (const name of Object.keys(FIGURES)) draw(name);
  }

  // Controls

  function showTables() {
    for (const block of document.querySelectorAll(".table-block")) {
      block.hidden = Number(block.dataset.place) !== state.place || state.hiddenRuns.has(Number(block.dataset.runBlock));
    }
    for (const row of document.querySelectorAll("[data-strategy-row]")) {
      row.hidden = state.hiddenStrategies.has(Number(row.dataset.strategyRow));
    }
    for (const tag of document.querySelectorAll(".place-tag")) {
      const place = D.places[state.place];
      tag.textContent = place.label;
      tag.className = `place-tag badge ${place.links}`;
    }
    document.getElementById("show-all").hidden = !state.hiddenStrategies.size && !state.hiddenRuns.size;
  }

  function refresh() {
    showTables();
    drawAll();
  }

  function toggles(selector, attribute, hidden) {
    for (const button of document.querySelectorAll(selector)) {
      button.addEventListener("click", () => {
        const number = Number(button.dataset[attribute]);
        if (!hidden.delete(number)) hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        refresh();
      });
    }
  }

  if (!D.rows.length) return;
  toggles("button[data-strategy]", "strategy", state.hiddenStrategies);
  toggles("button[data-run]", "run", state.hiddenRuns);
  document.getElementById("show-all").addEventListener("click", () => {
    state.hiddenStrategies.clear();
    state.hiddenRuns.clear();
    for (const button of document.querySelectorAll(".chip[aria-pressed]")) button.setAttribute("aria-pressed", "true");
    refresh();
  });
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => save(button.dataset.save));
  }
  for (const radio of document.querySelectorAll("input[name=place]")) {
    radio.addEventListener("change", () => { state.place = Number(radio.value); refresh(); });
    if (radio.checked) state.place = Number(radio.value);
  }
  document.querySelectorAll("button[data-run] .dash line").forEach((dash, index) => {
    dash.setAttribute("stroke-dasharray", DASH_ARRAYS[index % DASH_ARRAYS.length]);
  });
  for (const [id, key, read] of [["timeline-run", "run", Number], ["timeline-rank", "rank", String]]) {
    const select = document.getElementById(id);
    if (!select) continue;
    state[key] = read(select.value);
    select.addEventListener("change", () => { state[key] = read(select.value); draw("timeline"); });
  }
  // One link is chosen for most figures; each says which.
  for (const name of Object.keys(FIGURES)) {
    const heading = document.getElementById(`${name}-heading`);
    const isPlain = D.places.length === 1 && D.places[0].links === "shaped";
    if (!heading || name === "speedup" || isPlain) continue;
    const tag = document.createElement("span");
    tag.className = "place-tag badge";
    heading.append(tag);
  }

  refresh();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let lastWidth = innerWidth;
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (innerWidth !== lastWidth) { lastWidth = innerWidth; drawAll(); }
    }, 150);
  });
  addEventListener("beforeprint", () => { root.classList.add("printing"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); drawAll(); });
})();
