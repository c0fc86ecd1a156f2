// Draws the figures of a run's page from the JSON document in #data; figure_data.py says what it holds.
"use strict";
(() => {
  const { D, several, colour, esc, wrapped, strategyOf, nameOf, inkOf, letter, square, line } = figures;
  const { width, isNarrow, axis, pixelAxis, layout, note, atLeft, rowPlaces, rowsLayout, texts } = figures;
  const { ms, bytes, duration, sizeUnit, timeUnit } = units;
  const { state, chosen } = stage;
  Object.assign(state, { place: 0, run: 0, rank: "0" });

  const here = (list) => chosen(list, "place");
  const missing = (shown, why, rows = here(D.rows)) => stage.missing(shown, rows, why);
  const hover = (item, ...lines) => {
    const strategy = strategyOf(item);
    const full = strategy.text === strategy.name ? [] : [wrapped(strategy.text)];
    const run = several ? [`run ${esc(D.runs[item.run].letter)} ${esc(D.runs[item.run].label)}`] : [];
    return figures.hover(item, ...full, ...run, ...lines);
  };
  const across = (y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y });
  const inWords = (unit, isLog) => `(${unit}${isLog ? ", logarithmic" : ""})`;
  const logAxis = (isLog) => (isLog ? { type: "log", dtick: 1 } : { type: "linear" });
  // Values that differ more than this are told apart on a logarithmic axis only.
  const spreads = (values) => Math.max(...values) > 20 * Math.min(...values);
  const middle = (values, isLog) => {
    const most = Math.max(...values);
    return isLog ? Math.sqrt(most * Math.min(...values)) : most;
  };

  // Loss

  // A mean over the last steps: single batches are noise.
  const smooth = (values, window) => {
    let sum = 0;
    let num = 0;
    return values.map((value, index) => {
      const gone = index >= window ? values[index - window] : null;
      if (value !== null) [sum, num] = [sum + value, num + 1];
      if (gone !== null) [sum, num] = [sum - gone, num - 1];
      return value === null || !num ? null : sum / num;
    });
  };

  function lossFigure(name, key, axisTitle, unitFor, words, why) {
    const curves = here(D.curves).filter((curve) => curve.loss.length && curve[key].length);
    if (!curves.length) return null;
    const lasts = curves.map((curve) => curve[key].at(-1));
    const isLog = key === "bytes" && spreads(lasts);
    const [unit, factor] = unitFor(middle(lasts, isLog));
    const data = [];
    const seen = [];
    for (const curve of curves) {
      const x = curve[key].map((value) => value / factor);
      const window = Math.max(1, Math.round(curve.loss.length / 25));
      const y = smooth(curve.loss, window);
      seen.push(...y.filter((value) => value !== null));
      // With many strategies single steps would hide the means.
      if (window > 1 && curves.length <= 8) {
        const thin = { ...line(curve), width: 1, dash: "solid" };
        const quiet = { opacity: 0.2, hoverinfo: "skip", showlegend: false };
        data.push({ type: "scatter", mode: "lines", x, y: curve.loss, line: thin, ...quiet });
      }
      data.push({
        type: "scatter",
        mode: "lines+markers",
        name: nameOf(curve) + letter(curve),
        x,
        y,
        line: { ...line(curve), width: 2.2 },
        marker: { symbol: strategyOf(curve).symbol, size: 8, maxdisplayed: 7, color: line(curve).color },
        customdata: curve.step.map((step, index) => [step, words(curve[key][index])]),
        hovertemplate: hover(curve, "loss %{y:.4f} after %{customdata[1]}", "step %{customdata[0]}"),
      });
    }
    if (!seen.length) return null;
    seen.sort((a, b) => a - b);
    const isDrawn = (target) => curves.some((curve) => curve.run === target.run);
    const targets = new Set(D.targets.filter(isDrawn).map((target) => target.loss));
    const low = Math.min(seen[0], ...targets);
    // The first steps of one bad strategy must not flatten all the others.
    const usual = low + 2.5 * (seen[Math.floor(0.9 * (seen.length - 1))] - low);
    const high = Math.max(Math.min(seen.at(-1), usual > low ? usual : Infinity), ...targets);
    const room = (high - low) * 0.06 || 0.1;
    const title = `${axisTitle} ${inWords(unit, isLog)}`;
    return {
      data,
      layout: layout(isNarrow(name) ? 340 : 430, {
        xaxis: axis({ title, rangemode: "tozero", tickformat: ",", ...logAxis(isLog) }),
        yaxis: axis({ title: "loss", range: [low - room, high + room] }),
        shapes: [...targets].map((y) => ({ ...across(y), line: { color: colour("muted"), width: 1, dash: "dot" } })),
        annotations: [...targets].map((y) =>
          note(`target ${+y.toPrecision(4)}`, { xref: "paper", x: 0, y, xanchor: "left", yanchor: "bottom" }),
        ),
      }),
      aside: missing(curves, why),
    };
  }

  // Rows of bars and marks

  const BEYOND_COMPUTING = [
    ["encode_ms", "encode", "encoding and decoding"],
    ["exposed_ms", "exposed", "waiting for the network"],
  ];

  function stepFigure(name) {
    const share = (row, key) => `${ms(row[key])} ms (${units.percent(row[key] / row.step_ms)})`;
    const words = (row, parts) =>
      hover(
        row,
        `step ${ms(row.step_ms)} ms (quartiles ${ms(row.low_ms)} to ${ms(row.high_ms)})`,
        ...parts.map(([key, , what]) => `${what} ${share(row, key)}`),
      );
    const quartiles = (row) => [row.low_ms, row.step_ms, row.high_ms];
    return figures.stepTimes(name, here(D.rows), BEYOND_COMPUTING, quartiles, words);
  }

  function bytesFigure(name) {
    const rows = here(D.rows).filter((row) => row.wire_bytes || row.counted_bytes || row.predicted_bytes);
    if (!rows.length) return null;
    const places = rowPlaces(name, rows);
    const inks = rows.map(inkOf);
    const byTransport = (row) => row.counted_bytes ?? (row.source === "transport" ? row.wire_bytes : null);
    const marks = [
      {
        key: "counted by the kernel, headers included",
        values: rows.map((row) => (row.source === "kernel" ? row.wire_bytes : null)),
        marker: { symbol: "line-ns-open", size: 17, line: { width: 2.5, color: inks }, color: inks },
        path: "M7 0V12",
      },
      {
        key: "counted by laconic's transport",
        values: rows.map(byTransport),
        marker: { symbol: "circle", size: 8, color: inks },
        path: "M7 3a3 3 0 1 0 .01 0z",
        fill: true,
      },
      {
        key: "predicted",
        values: rows.map((row) => row.predicted_bytes),
        marker: { symbol: "diamond-open", size: 14, line: { width: 2 }, color: inks },
        path: "M7 1L12 6L7 11L2 6Z",
      },
    ].filter(({ values }) => values.some((value) => value));
    const all = marks.flatMap(({ values }) => values).filter((value) => value);
    const isLog = spreads(all);
    const [unit, factor] = sizeUnit(middle(all, isLog));
    const words = rows.map((row, index) => {
      const there = marks.filter(({ values }) => values[index]);
      return hover(row, ...there.map(({ key, values }) => `${key}: ${bytes(values[index])}`));
    });
    const data = marks.map(({ key, values, marker }) => ({
      type: "scatter",
      mode: "markers",
      name: key,
      x: values.map((value) => (value ? value / factor : null)),
      y: places.y,
      marker,
      hovertemplate: words,
      cliponaxis: false,
    }));
    const scale = (value) => (isLog ? Math.log10(value / factor) : value / factor);
    const [least, most] = [isLog ? scale(Math.min(...all)) : 0, scale(Math.max(...all))];
    const range = [least - (isLog ? 0.15 : 0), most + (most - least) * 0.08 + (isLog ? 0.1 : 0)];
    const found = rows.map((row, index) => {
      const own = marks.map(({ values }) => values[index]).filter((value) => value);
      const [low, high] = [Math.min(...own), Math.max(...own)];
      const sent = row.wire_bytes ?? row.counted_bytes;
      const percent = 100 * (sent / row.predicted_bytes - 1);
      const sign = percent > 0 ? "+" : "−";
      const beside = Math.abs(percent) < 0.05 ? "as predicted" : `${sign}${Math.abs(percent).toFixed(1)} %`;
      let text = sent === null ? bytes(row.predicted_bytes) : bytes(sent);
      if (sent !== null && row.predicted_bytes) text += ` (${beside})`;
      // There is more room on the other side of marks far to the right.
      const isRight = (scale(high) - range[0]) / (range[1] - range[0]) > 0.5;
      return { x: (isRight ? low : high) / factor, text, position: isRight ? "middle left" : "middle right" };
    });
    data.push(texts(found.map((at) => at.x), places.y, found.map((at) => at.text), found.map((at) => at.position)));
    const title = `sent by each rank per step ${inWords(unit, isLog)}`;
    return {
      data,
      layout: rowsLayout(places, axis({ title, range, tickformat: ",", ...logAxis(isLog) })),
      symbols: marks,
      aside: missing(rows, "its bytes were not counted"),
    };
  }

  // Speed-up

  function speedupFigure(name) {
    const isOther = (row) => strategyOf(row).colour !== "ddp";
    const rows = D.rows.filter((row) => stage.isShown(row) && row.speedup !== null && isOther(row));
    if (!rows.length) return null;
    const words = (row) =>
      hover(
        row,
        `${row.speedup.toFixed(2)}x ${esc(D.ddp)} on ${esc(D.places[row.place].label)}`,
        `step ${ms(row.step_ms)} ms`,
      );
    const ticktext = D.places.map(({ link, links }) => (link === links ? esc(link) : `${esc(link)}<br>${esc(links)}`));
    const ddp = note(D.ddp, { xref: "paper", x: 1, y: 1, xanchor: "right", yanchor: "top" });
    return {
      data: figures.curves(rows, "place", (row) => row.place, (row) => row.speedup, words),
      layout: layout(isNarrow(name) ? 340 : 420, {
        xaxis: axis({
          tickvals: D.places.map((_, index) => index),
          ticktext,
          range: [-0.2, D.places.length - 0.8],
          showgrid: false,
        }),
        yaxis: axis({ title: `times as fast as ${D.ddp}`, rangemode: "tozero", ticksuffix: "x" }),
        shapes: [{ ...across(1), layer: "below", line: { color: colour("ddp"), width: 2 } }],
        annotations: isNarrow(name) ? [] : [ddp],
      }),
    };
  }

  // Timeline: lanes with a height in pixels, block under block

  const TITLE = 20;
  const TRAINING = 22;
  const CODING = 8;
  const BLOCK = 22;
  // Lanes that can be read, unless there are too many of them.
  const laneHeight = (number) => (number <= 12 ? 14 : 7);
  const CHARACTER = 6;
  // Of a step whose exchanges end in the next one, this much more is drawn.
  const BEYOND = 0.3;

  // The longest of some texts, given by falling length, that has room in so many pixels.
  const fitting = (room, ...choices) => choices.find((text) => text.length * CHARACTER + 8 <= room) || "";

  // One bar of a block: where it is, what stands on it, what hovering tells.
  function timelineBar(item, span, place, perMs, [from, until]) {
    const { kind, start, took, bucket, sent, age, half } = span;
    const begin = Math.max(start, from);
    const shown = Math.min(start + took, until) - begin;
    const room = shown * perMs;
    const size = sent === null ? "" : bytes(sent);
    const part = half === null ? "" : half === 1 ? ", first half" : ", second half";
    let [ink, text, what] = [kind, "", kind];
    if (kind === "wait") {
      what = bucket === null ? "waiting" : `waiting for bucket ${bucket}`;
      const named = [`waits for bucket ${bucket}`, `bucket ${bucket}`, `${bucket}`];
      text = fitting(room, ...(bucket === null ? ["waits"] : named));
    } else if (kind === "exchange") {
      ink = age < 0 ? "earlier" : kind;
      what = `exchange of bucket ${bucket}${part}`;
      if (place.height > 10) text = fitting(room, `${bucket}: ${size}`, `${bucket}`);
    } else if (kind === "encode" || kind === "decode") what = `${kind} bucket ${bucket}`;
    else if (age > 0) [text, what] = [fitting(room, `next ${kind}`, kind), `${kind} of the next step`];
    else text = fitting(room, kind);
    const lines = [`<b>${what}</b> ${ms(took)} ms`, `from ${ms(start)} to ${ms(start + took)} ms`];
    if (kind !== "wait" && age < 0) lines.push("of the step before");
    if (size && kind === "exchange") lines.push(`sends ${size}`);
    const where = { x: shown, base: begin, y: place.top + place.height / 2, width: place.height };
    return { ...where, ink, text, age, words: hover(item, ...lines) };
  }

  function timelineFigure(name) {
    const ofRun = here(D.timelines).filter((item) => item.run === state.run);
    const items = ofRun.filter((item) => item.ranks[state.rank]);
    if (!items.length) return null;
    const narrow = isNarrow(name);
    const read = ([kind, start, took, bucket, sent, lane, age, half]) => ({
      kind: D.kinds[kind], start, took, bucket, sent, lane, age, half,
    });
    const steps = items.map((item) => {
      const step = item.ranks[state.rank];
      const spans = step.spans.map(read);
      const last = Math.max(...spans.map(({ start, took }) => start + took));
      const end = step.begin + step.ms;
      return { item, words: step.words, spans, last, end, until: Math.min(last, end + BEYOND * step.ms) };
    });
    const most = Math.max(...steps.map(({ until }) => until));
    const room = width(name) - (narrow ? 20 : 95);
    const perMs = room / (most * 1.01);
    const lettersPerLine = Math.floor(room / 6.6);
    const bars = [];
    const titles = [];
    const shapes = [];
    const ticks = { tickvals: [], ticktext: [] };
    const label = (y, text) => {
      ticks.tickvals.push(y);
      ticks.ticktext.push(text);
    };
    let y = 0;
    for (const { item, words, spans: all, last, end, until } of steps) {
      const font = { size: 13, color: colour("text") };
      titles.push(note(`${square(item)} <b>${nameOf(item)}</b>`, { ...atLeft(y + TITLE / 2), font }));
      y += TITLE;
      const lines = wrapped(words, lettersPerLine).split("<br>");
      lines.forEach((text, index) => titles.push(note(text, atLeft(y + index * 16 + 8))));
      const training = y + lines.length * 16 + 5;
      const spans = all.filter(({ start }) => start < until);
      const exchanges = spans.filter(({ kind }) => kind === "exchange");
      const isCoded = spans.some(({ kind }) => kind === "encode" || kind === "decode");
      const lanes = Math.max(0, ...exchanges.map(({ lane }) => lane + 1));
      const height = laneHeight(lanes);
      const coding = training + TRAINING + 3;
      const exchanging = coding + (isCoded ? CODING + 3 : 0);
      const bottom = lanes ? exchanging + lanes * height : training + TRAINING;
      label(training + TRAINING / 2, "training");
      if (lanes) label(exchanging + Math.min(lanes * height, 16) / 2, "exchanges");
      for (const span of spans) {
        const { kind, start, took } = span;
        let place = { top: training, height: TRAINING };
        if (kind === "exchange") place = { top: exchanging + span.lane * height, height: height - 1 };
        else if (kind === "encode" || kind === "decode") place = { top: coding, height: CODING };
        bars.push(timelineBar(item, span, place, perMs, [0, until]));
        if (kind !== "wait") continue;
        // What is exchanged below a wait is what costs.
        const at = { x0: start, x1: Math.min(start + took, until), y0: training + TRAINING, y1: bottom + 1 };
        const looks = { layer: "below", fillcolor: colour("wait"), opacity: 0.14, line: { width: 0 } };
        shapes.push({ type: "rect", ...at, ...looks });
      }
      if (last > end + 0.1) {
        const at = { x0: end, x1: end, y0: training - 4, y1: bottom + 3 };
        shapes.push({ type: "line", ...at, line: { color: colour("text"), width: 1.2, dash: "dot" } });
        const goesOn = until < last ? `, the last exchange ends at ${ms(last)} ms` : "";
        const beside = { x: end, xanchor: end > most / 2 ? "right" : "left", y: bottom + 9, yanchor: "middle" };
        const where = narrow ? atLeft(bottom + 9) : beside;
        titles.push(note(`next step${goesOn}`, { ...where, font: { size: 11, color: colour("muted") } }));
        y = bottom + 10;
      } else y = bottom;
      y += BLOCK;
    }
    const inks = ["forward", "backward", "optimizer", "wait", "encode", "decode", "exchange", "earlier"];
    const used = inks.filter((ink) => bars.some((bar) => bar.ink === ink));
    const data = used.map((ink) => {
      const own = bars.filter((bar) => bar.ink === ink);
      const isCoding = ink === "encode" || ink === "decode";
      const isDark = !["forward", "exchange", "earlier"].includes(ink);
      return {
        type: "bar",
        orientation: "h",
        name: ink === "earlier" ? "exchange of the step before" : ink,
        x: own.map((bar) => bar.x),
        base: own.map((bar) => bar.base),
        y: own.map((bar) => bar.y),
        width: own.map((bar) => bar.width),
        marker: {
          color: colour(ink),
          opacity: own.map((bar) => (bar.age > 0 ? 0.45 : 1)),
          // Encoding may take less than a pixel; a rim of its own colour keeps it visible. Nor must a rim hide a bar.
          line: {
            width: own.map((bar) => (isCoding || bar.x * perMs > 4 ? 0.8 : 0)),
            color: colour(isCoding ? ink : "page"),
          },
        },
        text: own.map((bar) => bar.text),
        textposition: "inside",
        insidetextanchor: "middle",
        textangle: 0,
        constraintext: "none",
        textfont: { color: isDark ? "#ffffff" : colour("text"), size: isDark || ink === "forward" ? 11 : 10 },
        hovertemplate: own.map((bar) => bar.words),
      };
    });
    const WORDS = {
      wait: "waiting for an exchange",
      exchange: "exchange (bucket: bytes sent)",
      earlier: "exchange of the step before",
    };
    return {
      data,
      layout: layout(y + 56, {
        xaxis: axis({ title: "since the step began (ms)", range: [0, most * 1.01], tickformat: "," }),
        yaxis: pixelAxis([y, -4], !narrow, { ...ticks, tickfont: { color: colour("muted"), size: 11 } }),
        shapes,
        annotations: titles,
      }),
      key: used.map((ink) => [ink, WORDS[ink] || ink]),
      aside: missing(
        items,
        "no details of its steps were recorded",
        here(D.rows).filter((row) => row.run === state.run),
      ),
    };
  }

  const FIGURES = {
    "loss-time": (name) => lossFigure(name, "seconds", "training time", timeUnit, duration, "it has no losses"),
    "loss-bytes": (name) =>
      lossFigure(name, "bytes", "sent by each rank", (most) => sizeUnit(most, 2), bytes, "its bytes were not counted"),
    "step-time": stepFigure,
    speedup: speedupFigure,
    timeline: timelineFigure,
    bytes: bytesFigure,
  };

  // Most figures show one kind of link, and say which; on one shaped link the table's heading is enough.
  const needsTag = (name) => name !== "speedup" && (D.places.length > 1 || D.places[0].links !== "shaped");

  function writeTags() {
    const place = D.places[state.place];
    for (const tag of document.querySelectorAll("[data-tag]")) {
      tag.hidden = !needsTag(tag.dataset.tag);
      tag.textContent = tag.hidden ? "" : place.label;
      tag.className = `badge ${place.links}`;
    }
  }

  if (!D.rows.length) return;
  for (const [id, key, read] of [["timeline-run", "run", Number], ["timeline-rank", "rank", String]]) {
    const select = document.getElementById(id);
    if (!select) continue;
    state[key] = read(select.value);
    select.addEventListener("change", () => {
      state[key] = read(select.value);
      stage.draw("timeline");
    });
  }
  document.querySelectorAll("button[data-run] .dash line").forEach((dash, index) => {
    dash.setAttribute("stroke-dasharray", figures.dashOf(index)[1]);
  });
  // The timeline keeps its selectors: another rank or run may have one.
  stage.open(FIGURES, writeTags, (name) => name === "timeline" && here(D.timelines).length > 0);
})();
