// Puts figures on a page and draws them again when a choice, the colour scheme, the width or the medium changes.
"use strict";
const stage = (() => {
  const { D, several, colour, esc, strategyOf, width } = figures;
  const root = document.documentElement;
  root.classList.add("js");
  const hidden = { strategy: new Set(), run: new Set() };
  // What is chosen, as positions in lists of the document; a page adds choices of its own.
  const state = {};
  const drawn = {};
  let makers = {};
  let isKept = () => false;
  let writeTags = () => {};

  // What is shown

  const isShown = (item) => !hidden.strategy.has(item.strategy) && !hidden.run.has(item.run);
  const chosen = (list, ...keys) =>
    list
      .filter((item) => isShown(item) && keys.every((key) => item[key] === state[key]))
      .sort((a, b) => a.strategy - b.strategy || (a.run || 0) - (b.run || 0));

  // Strategies that a figure cannot show, so that readers do not miss them.
  function missing(shown, rows, why) {
    const names = rows
      .filter((row) => !shown.some((item) => item.strategy === row.strategy && item.run === row.run))
      .map((row) => strategyOf(row).name + (several ? ` (${D.runs[row.run].letter})` : ""));
    return names.length ? `Not shown: ${[...new Set(names)].join(", ")} - ${why}.` : "";
  }

  // Drawing

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
    for (const symbol of figure.symbols || []) {
      const entry = document.createElement("span");
      const fill = symbol.fill ? "currentColor" : "none";
      const path = `<path d="${symbol.path}" stroke="currentColor" stroke-width="2" fill="${fill}"/>`;
      entry.innerHTML = `<svg width="14" height="12" aria-hidden="true">${path}</svg>`;
      entry.append(symbol.key);
      key.append(entry);
    }
  }

  function draw(name) {
    const plot = document.getElementById(name);
    if (!plot) return;
    const section = document.getElementById(`${name}-section`);
    section.hidden = false;
    const figure = makers[name](name);
    section.hidden = figure === null && !isKept(name);
    plot.hidden = figure === null;
    showKey(name, figure || {});
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
    for (const name of Object.keys(makers)) draw(name);
  }

  // The page's legend is not part of a figure, so a saved one gets a legend of its own.
  function save(name) {
    const heading = document.getElementById(`${name}-heading`);
    const text = [...heading.childNodes].map((part) => part.textContent.trim()).filter(Boolean).join(", ");
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

  // Tables and controls

  function showTables() {
    for (const block of document.querySelectorAll(".table-block")) {
      const isOther = (key) => key in block.dataset && Number(block.dataset[key]) !== state[key];
      block.hidden = Object.keys(state).some(isOther) || hidden.run.has(Number(block.dataset.runBlock));
    }
    for (const row of document.querySelectorAll("[data-strategy-row]")) {
      row.hidden = hidden.strategy.has(Number(row.dataset.strategyRow));
    }
    document.getElementById("show-all").hidden = !hidden.strategy.size && !hidden.run.size;
  }

  function refresh() {
    showTables();
    writeTags();
    drawAll();
  }

  function listen() {
    for (const [attribute, own] of Object.entries(hidden)) {
      for (const button of document.querySelectorAll(`button[data-${attribute}]`)) {
        button.addEventListener("click", () => {
          const number = Number(button.dataset[attribute]);
          if (!own.delete(number)) own.add(number);
          button.setAttribute("aria-pressed", String(!own.has(number)));
          refresh();
        });
      }
    }
    document.getElementById("show-all").addEventListener("click", () => {
      for (const own of Object.values(hidden)) own.clear();
      const pressed = document.querySelectorAll(".chip[aria-pressed]");
      for (const button of pressed) button.setAttribute("aria-pressed", "true");
      refresh();
    });
    for (const button of document.querySelectorAll("[data-save]")) {
      button.addEventListener("click", () => save(button.dataset.save));
    }
    for (const radio of document.querySelectorAll(".controls input[type=radio]")) {
      // A browser may remember the choice of an earlier visit.
      if (radio.checked) state[radio.name] = Number(radio.value);
      radio.addEventListener("change", () => {
        state[radio.name] = Number(radio.value);
        refresh();
      });
    }
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
    for (const [event, isPrinting] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(event, () => {
        root.classList.toggle("printing", isPrinting);
        drawAll();
      });
    }
  }

  // made: {figure's name: function that builds it, or gives null}; tag: writes into headings what is chosen;
  // kept: whether a figure that has nothing to draw keeps its place and says so.
  function open(made, tag, kept) {
    [makers, writeTags, isKept] = [made, tag, kept];
    listen();
    refresh();
  }

  return { state, isShown, chosen, missing, draw, open };
})();
