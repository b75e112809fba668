// Plots the figures of the page with uPlot, and marks the events. follow.js calls `page.show`
// again after it has replaced the page's content.
"use strict";
(() => {
  const hidden = new Set(); // labels of the runs that are not shown
  let content = null, plots = [];

  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  function colour(css) {
    probe.style.color = css;
    return getComputedStyle(probe).color;
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // 1e-6, 0.25, 1,500; at most `digits` digits that count.
  function shortNumber(value, digits = 4) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
  }

  // The mean of the last `window` points before and at each one; points without a value are left out.
  function trailingMean(values, window) {
    if (window === 1) return values;
    return values.map((_, end) => {
      const defined = values.slice(Math.max(0, end + 1 - window), end + 1).filter((v) => v !== null);
      return defined.length ? defined.reduce((a, b) => a + b) / defined.length : null;
    });
  }

  const isShown = (label) => !hidden.has(label.name);
  const labelOf = (run) => content.labels[content.runs[run]];
  const shownEvents = () => content.events.filter((event) => isShown(labelOf(event.run)));

  function seriesOf(curve) {
    const seeds = content.runs.filter((label) => label === content.runs[curve.run]).length > 1;
    const label = labelOf(curve.run);
    const line = { label: label.name + (curve.mean ? ", mean" : ""), show: isShown(label), stroke: colour(label.colour), spanGaps: true };
    const dash = label.dash ? label.dash.split(" ").map(Number) : [];
    const width = curve.mean ? 2.4 : seeds ? 1 : 2, alpha = seeds && !curve.mean ? 0.5 : 1;
    const mean = { ...line, width, alpha, dash, value: (_, value) => (value == null ? "–" : shortNumber(value)) };
    return curve.faint ? [{ ...line, class: "faint", width: 1, alpha: 0.28, points: { show: false } }, mean] : [mean];
  }

  // Columns for uPlot: the steps of all curves, and for each curve its values and their mean.
  function columns(curves) {
    const ends = [content.first, content.last];
    return uPlot.join([[ends], ...curves.map((curve) => {
      const mean = trailingMean(curve.values, curve.window);
      return curve.faint ? [curve.steps, curve.values, mean] : [curve.steps, mean];
    })]);
  }

  // Colour and dashes of the line that marks an event, by its kind.
  const LINES = {
    symptom: ["var(--mark)", [1, 4]], damage: ["var(--bad)", []], measure: ["var(--accent)", [7, 3]], other: ["var(--soft)", [3, 3]],
  };

  function plotEvents(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    ctx.textAlign = "center";
    for (const event of shownEvents()) {
      const x = Math.round(u.valToPos(event.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const [stroke, dashes] = LINES[event.kind];
      ctx.strokeStyle = ctx.fillStyle = colour(stroke);
      ctx.setLineDash(dashes.map((length) => length * devicePixelRatio));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const row = Object.keys(LINES).indexOf(event.kind);  // those of one step stand below each other
      ctx.fillText(content.symbols[event.kind], x, bbox.top + (6 + 11 * row) * devicePixelRatio);
    }
    ctx.restore();
  }

  // uPlot's legend follows the cursor, with the events of the step below it.
  function placeTip(u) {
    const tip = u.root.querySelector(".tip"), { idx, left } = u.cursor;
    tip.hidden = idx === null || left < 0;
    if (tip.hidden) return;
    const step = u.data[0][idx], distance = (u.scales.x.max - u.scales.x.min) / 80;
    const near = shownEvents().filter((event) => Math.abs(event.step - step) <= distance).slice(0, 4);
    tip.lastChild.replaceChildren(...near.map((event) => element("div", `${event.title} (after step ${event.step})`)));
    const at = u.over.offsetLeft + left, room = u.root.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(2, Math.min(at + 12 > room ? at - tip.offsetWidth - 12 : at + 12, room))}px`;
  }

  function addTip(u, legend) {
    const tip = u.root.appendChild(element("div", undefined, "tip"));
    tip.hidden = true;
    tip.append(legend, element("div", undefined, "event"));
  }

  // Shares start at 0.
  function range(unit, low, high) {
    if (low === null) return [0, 1];
    if (unit === "share" && low >= 0 && high <= 1) return [0, high > 0.5 ? 1.02 : high * 1.15 || 0.01];
    return uPlot.rangeNum(low, high, 0.1, true);
  }

  function makePlot(plot) {
    const { curves, unit } = content.figures[plot.dataset.figure][plot.dataset.panel];
    const axis = { stroke: colour("var(--soft)"), font: "11px system-ui, sans-serif", grid: { stroke: colour("var(--grid)"), width: 1 }, ticks: { show: false } };
    const chart = new uPlot({
      width: Math.max(120, plot.clientWidth), height: plot.clientHeight, padding: [8, 12, 0, 0],
      legend: { mount: addTip, markers: { width: 0, fill: (u, index) => u.series[index].stroke(u, index) } },
      cursor: {
        sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false }, y: false,
        hover: { skip: [null], prox: 30 }, points: { size: (u, index) => (u.series[index].class ? 0 : 7) },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => range(unit, low, high) } },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en-US") : "")) },
        { ...axis, size: 56, space: 34, values: (_, ticks) => ticks.map((tick) => shortNumber(tick, 6)) },
      ],
      series: [{ label: "step", value: (_, step) => step?.toLocaleString("en-US") ?? "" }, ...curves.flatMap(seriesOf)],
      hooks: { draw: [plotEvents], setCursor: [placeTip] },
    }, columns(curves), plot);
    plot.dataset.plotted = "yes";
    return { plot, chart };
  }

  // Plots in closed figures are made when their figure is opened.
  function plotAll() {
    plots.forEach(({ chart }) => chart.destroy());
    plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.closest("details").open).map(makePlot);
  }

  document.addEventListener("keydown", (event) => {
    const found = plots.find(({ plot }) => plot === event.target);
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
    if (!found || by === undefined) return;
    event.preventDefault();
    const { chart, plot } = found, last = chart.data[0].length - 1;
    const at = Math.min(last, Math.max(0, (chart.cursor.idx ?? last + (by < 0 ? 1 : 0)) + by));
    chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: plot.clientHeight / 3 });
  });
  document.addEventListener("focusout", ({ target }) => {
    plots.find(({ plot }) => plot === target)?.chart.setCursor({ left: -10, top: -10 });
  });

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.(".legend button");
    if (!button) return;
    const { name } = content.labels[button.dataset.label];
    if (!hidden.delete(name)) hidden.add(name);
    pressButtons();
    plotAll();
  });
  function pressButtons() {
    document.querySelectorAll(".legend button").forEach((button) => {
      button.setAttribute("aria-pressed", String(isShown(content.labels[button.dataset.label])));
    });
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const { style } = document.documentElement, now = style.colorScheme || (dark.matches ? "dark" : "light");
    style.colorScheme = now === "dark" ? "light" : "dark";
    plotAll();
  });
  dark.addEventListener("change", plotAll);
  let width = innerWidth, waiting;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(plotAll, 120);
  });

  // Plots what the page's content holds now.
  function show() {
    content = JSON.parse(document.getElementById("data").textContent);
    if (content) {  // null: no run has started
      const all = content.steps.flat();
      content.first = all.reduce((a, b) => Math.min(a, b), Infinity);
      content.last = all.reduce((a, b) => Math.max(a, b), -Infinity);
      for (const { curves } of content.figures.flat()) curves.forEach((curve) => { curve.steps = content.steps[curve.steps]; });
    }
    document.querySelectorAll("details.figure").forEach((figure) => figure.addEventListener("toggle", () => {
      if (figure.open && figure.querySelector(".plot:not([data-plotted])")) plotAll();
    }));
    pressButtons();
    plotAll();
  }
  window.page = { show, element, shortNumber };
  show();
})();
