// Draws the figures of the page with uPlot, and marks the events. `window.page` is what the live view
// calls after it has replaced the page's content.
"use strict";
(() => {
  const WIDTHS = { axis: 26, tick: 6.4 };
  const hidden = new Set(); // "section/label" of the runs that are not shown
  let sections = [], plots = [];

  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  function colour(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }

  // The last `window` points before and at each one; points without a value are left out.
  function trailingMean(values, window) {
    if (window === 1) return values;
    return values.map((_, end) => {
      const defined = values.slice(Math.max(0, end + 1 - window), end + 1).filter((v) => v !== null);
      return defined.length ? defined.reduce((a, b) => a + b) / defined.length : null;
    });
  }

  // Numbers as short as the distance of the ticks allows: 1e-6, 0.25, 1,500.
  function tickLabel(value, distance) {
    if (value === 0) return "0";
    let digits = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
    if (Math.abs(distance * 10 ** digits - Math.round(distance * 10 ** digits)) > 1e-6) digits += 1; // 0.25
    const size = Math.abs(value);
    if (digits > 3 || size >= 1e6) {
      const places = Math.max(0, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(distance) + 1e-9));
      return value.toExponential(Math.min(places, 4)).replace("e+", "e");
    }
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function shortNumber(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace("e+", "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  }

  // The range of the vertical axis; a constant gets room in proportion to its own size.
  function range(share, low, high) {
    if (low === null || high === null) return [0, 1];
    if (share && low >= 0 && high <= 1) return [0, high > 0.5 ? 1.02 : high * 1.15 || 0.01];
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const room = high - low > size * 1e-9 ? (high - low) * 0.08 : size * 0.1;
    return [low >= 0 && low < (high - low) * 0.25 ? 0 : low - room, high + room];
  }

  function curvesOf(section, panel) {
    return panel.curves.map((curve) => {
      const label = section.labels[section.runs[curve.run]];
      return { ...curve, label, means: trailingMean(curve.values, curve.window) };
    });
  }

  // One sorted list of steps and a column of values per series, which is what uPlot draws.
  function columns(curves) {
    const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, index) => [step, index]));
    const column = (curve, values) => {
      const full = new Array(steps.length).fill(null);
      curve.steps.forEach((step, index) => { full[place.get(step)] = values[index]; });
      return full;
    };
    const faint = curves.filter((curve) => curve.faint);
    return {
      data: [steps, ...faint.map((c) => column(c, c.values)), ...curves.map((c) => column(c, c.means))],
      faint,
    };
  }

  const DASHES = { solid: [], dash: [8, 4], dot: [2, 3], dashdot: [8, 3, 2, 3] };

  function series(section, number, curves, faint) {
    const show = (curve) => !hidden.has(`${number}/${curve.label.name}`);
    const seeds = (curve) => curves.filter((other) => other.label === curve.label).length > 1;
    const line = (curve, more) => ({ label: curve.label.name, show: show(curve), stroke: colour(curve.label.colour), spanGaps: true, ...more });
    return [
      {},
      ...faint.map((curve) => line(curve, { width: 1, alpha: 0.28, points: { show: false } })),
      ...curves.map((curve) => line(curve, {
        width: seeds(curve) ? 1.2 : 2, dash: DASHES[curve.label.dash], curve,
        points: { show: curve.dots, size: seeds(curve) ? 4 : 6, fill: colour(curve.label.colour) },
      })),
    ];
  }

  function eventsOf(section, number) {
    return section.events.filter((e) => !hidden.has(`${number}/${section.labels[section.runs[e.run]].name}`));
  }

  function drawEvents(u, section, number) {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--mark");
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    for (const event of eventsOf(section, number)) {
      const x = Math.round(u.valToPos(event.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.globalAlpha = 0.7;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, bbox.top - 1);
      ctx.lineTo(x + 4 * ratio, bbox.top - 1);
      ctx.lineTo(x, bbox.top + 6 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function cursorPoint(u, index) {
    const { curve } = u.series[index];
    if (!curve) return undefined; // single steps behind a trailing mean have none
    const point = element("div", undefined, "u-cursor-pt");
    Object.assign(point.style, { width: "7px", height: "7px", margin: "-3.5px 0 0 -3.5px", background: `var(${curve.label.colour})` });
    return point;
  }

  function nearest(column, index) {
    for (let away = 0; away < 12; away += 1)
      for (const at of [index - away, index + away])
        if (column[at] !== null && column[at] !== undefined) return at;
    return null;
  }

  // The values under the cursor, in the plot that the pointer or the focus is in.
  function showTip(u, plot, section, number) {
    plot.querySelector(".tip")?.remove();
    const { idx, left } = u.cursor;
    if (idx === null || idx === undefined || left < 0 || !plot.matches(":hover, :focus")) return;
    const tip = element("div", undefined, "tip");
    tip.append(element("strong", `step ${u.data[0][idx].toLocaleString("en-US")}`));
    u.series.forEach((one, index) => {
      if (!one.curve || !one.show) return;
      const at = one.curve.dots ? nearest(u.data[index], idx) : idx;
      const value = at === null ? null : u.data[index][at];
      if (value === null || value === undefined || tip.childElementCount > 12) return;
      const row = element("div"), dot = element("i");
      dot.style.background = `var(${one.curve.label.colour})`;
      row.append(dot, element("span", section.labels.length > 1 ? one.curve.label.name : ""), element("b", shortNumber(value)));
      tip.append(row);
    });
    const distance = (u.scales.x.max - u.scales.x.min) / 80;
    for (const event of eventsOf(section, number).slice(0, 200))
      if (Math.abs(event.step - u.data[0][idx]) <= distance && tip.childElementCount < 16)
        tip.append(element("div", `${event.title} (after step ${event.step})`, "event"));
    plot.append(tip);
    const at = u.over.offsetLeft + left, room = plot.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(2, Math.min(at + 12 > room ? at - tip.offsetWidth - 12 : at + 12, room))}px`;
    tip.style.top = "8px";
  }

  function options(plot, section, number, panel, curves, faint) {
    const axis = { stroke: colour("--soft"), font: '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    return {
      width: Math.max(120, plot.clientWidth), height: plot.clientHeight, padding: [8, 12, 0, 0], legend: { show: false },
      cursor: {
        sync: { key: `section-${number}`, scales: ["x", null] }, drag: { x: true, y: false }, y: false,
        points: { show: cursorPoint },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => range(panel.share, low, high) } },
      axes: [
        { ...axis, size: WIDTHS.axis, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 2500, 5000, 10000, 20000, 50000, 100000], values: (_, ticks) => ticks.map((t) => t.toLocaleString("en-US")) },
        {
          ...axis, space: 34,
          values: (_, ticks, __, ___, distance) => ticks.map((tick) => tickLabel(tick, distance)),
          size: (_, labels) => 12 + WIDTHS.tick * Math.max(2, ...(labels ?? []).map((label) => label.length)),
        },
      ],
      series: series(section, number, curves, faint),
      hooks: { draw: [(u) => drawEvents(u, section, number)], setCursor: [(u) => showTip(u, plot, section, number)] },
    };
  }

  function drawPlot(plot) {
    const number = Number(plot.dataset.section), section = sections[number];
    const panel = section.figures[plot.dataset.figure][plot.dataset.panel];
    const curves = curvesOf(section, panel);
    const { data, faint } = columns(curves);
    const drawn = new uPlot(options(plot, section, number, panel, curves, faint), data, plot);
    plot.dataset.drawn = "yes";
    return { plot, drawn };
  }

  // Plots in closed figures are drawn when their figure is opened.
  function drawAll() {
    plots.forEach(({ drawn }) => drawn.destroy());
    document.querySelectorAll(".plot .tip").forEach((tip) => tip.remove());
    plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.closest("details").open).map(drawPlot);
  }

  const moveCursor = ({ drawn, plot }, by) => {
    const last = drawn.data[0].length - 1;
    const at = Math.min(last, Math.max(0, (drawn.cursor.idx ?? last + (by < 0 ? 1 : 0)) + by));
    drawn.setCursor({ left: drawn.valToPos(drawn.data[0][at], "x"), top: plot.clientHeight / 3 });
  };

  document.addEventListener("keydown", (event) => {
    const found = plots.find(({ plot }) => plot === event.target);
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
    if (!found || by === undefined) return;
    event.preventDefault();
    moveCursor(found, by);
  });
  document.addEventListener("focusout", ({ target }) => {
    const found = plots.find(({ plot }) => plot === target);
    if (found) found.drawn.setCursor({ left: -10, top: -10 });
  });

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.(".legend button");
    if (!button) return;
    const number = Number(button.parentElement.dataset.section);
    const key = `${number}/${sections[number].labels[button.dataset.label].name}`;
    if (!hidden.delete(key)) hidden.add(key);
    pressButtons();
    drawAll();
  });
  function pressButtons() {
    document.querySelectorAll(".legend button").forEach((button) => {
      const number = Number(button.parentElement.dataset.section);
      const { name } = sections[number].labels[button.dataset.label];
      button.setAttribute("aria-pressed", String(!hidden.has(`${number}/${name}`)));
    });
  }

  function setTheme(theme) {
    document.documentElement.style.colorScheme = theme;
    drawAll();
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light");
    setTheme(now === "dark" ? "light" : "dark");
  });
  dark.addEventListener("change", drawAll);
  let width = innerWidth, waiting;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });

  // Draws what the page's content holds now; called again after the content was replaced.
  function show() {
    sections = JSON.parse(document.getElementById("data").textContent);
    for (const { steps, figures } of sections)
      for (const { curves } of figures.flat()) curves.forEach((curve) => { curve.steps = steps[curve.steps]; });
    document.querySelectorAll("details.figure").forEach((figure) => figure.addEventListener("toggle", () => {
      if ([...figure.querySelectorAll(".plot")].some((plot) => figure.open && !plot.dataset.drawn)) drawAll();
    }));
    pressButtons();
    drawAll();
  }
  window.page = { show, element, shortNumber };
  show();
})();
