// The rollout reader: a list of the rollouts of a step, and the chosen one with coloured tokens.
// Rollouts come from the page itself.
// Every text is set as text, never as HTML.
"use strict";
(() => {
  const { element, shortNumber } = window.page;
  const $ = (id) => document.getElementById(id);
  const reader = $("rollouts"), list = $("reader-list"), detail = $("reader-detail");
  const ALL = "all";
  // Each colouring: the key of the tokens' values, its name, and whether small or large values are
  // shown, or both signs.
  const COLOURINGS = [
    { key: "", name: "none" },
    { key: "advantage", name: "advantage", kind: "both" },
    { key: "teacher_logprob", name: "teacher log-probability", kind: "low" },
    { key: "rollout_logprob", name: "student log-probability", kind: "low" },
    { key: "kl_reference", name: "KL to the reference", kind: "high" },
    { key: "kl_teacher", name: "KL to the teacher", kind: "high" },
    { key: "thought", name: "thought", kind: "high", words: "before the answer" },
    { key: "repetition", name: "repetition", kind: "high", words: "in the repeated tail" },
  ];
  const ENDED = {
    open: "not finished", stop: "stopped", length: "truncated", turns: "out of turns", window: "window full",
    refused: "refused", failed: "failed", abort: "aborted",
  };
  const FILTERS = {
    all: () => true,
    truncated: (r) => ["length", "turns", "window"].includes(r.finish),
    repetitive: (r) => r.repeats > 0,
    wrong: (r) => r.reward !== null && r.reward <= 0,
    right: (r) => r.reward !== null && r.reward > 0,
  };
  const state = { run: 0, step: null, filter: "all", search: "", colour: "advantage", chosen: null, shown: [], token: -1, follow: true };
  let runs = [], kept = { runs: [], rollouts: [] };

  // The page's own rollouts: gzipped JSON in base64.
  async function embedded() {
    const text = $("rollout-data").textContent.trim();
    if (!text) return { runs: [], rollouts: [] };
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }
  const texts = (found) => [found.prompt, found.text, found.pieces?.join("") ?? "", ...(found.turns ?? []).flatMap((t) => [t.observed, t.text])];
  const listed = (run, step, search) => kept.rollouts.filter((r) => r.run === run && (step === ALL || r.step === step)
    && (!search || texts(r.detail).some((t) => t.toLowerCase().includes(search))));

  function fill(select, options, value) {
    select.replaceChildren(...options.map(([key, name]) => {
      const option = element("option", name);
      option.value = key;
      return option;
    }));
    select.value = String(value);
  }

  function showChoices() {
    const steps = runs[state.run]?.steps ?? [];
    if (state.step === null || (state.step !== ALL && !steps.includes(state.step))) state.step = steps.at(-1) ?? null;
    fill($("reader-run"), runs.map((run, index) => [index, run.label]), state.run);
    $("run-choice").hidden = runs.length < 2;
    const all = steps.length > 1 ? [[ALL, "all kept here"]] : [];
    fill($("reader-step"), [...all, ...steps.map((step) => [step, step.toLocaleString("en-US")])], state.step);
    document.querySelectorAll("[data-filter]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.filter === state.filter)));
  }

  function showList() {
    showChoices();
    const found = state.step === null ? [] : listed(state.run, state.step, state.search.toLowerCase());
    state.shown = found.filter(FILTERS[state.filter]);
    $("reader-count").textContent = `${state.shown.length} of ${found.length} rollouts`;
    $("reader-kept").textContent = keptHere(runs[state.run]);
    list.replaceChildren(...state.shown.map(listItem));
    const same = state.shown.findIndex((r) => state.chosen && r.step === state.chosen.step && r.index === state.chosen.index && r.run === state.chosen.run);
    choose(Math.max(0, same));
  }

  // What of a run's rollouts the page holds.
  function keptHere(run) {
    if (!run) return "";
    return `This page holds ${run.steps.length.toLocaleString("en-US")} of ${run.stored.toLocaleString("en-US")} stored steps and at most ${run.per_step} rollouts of each.`;
  }

  function badge(text, kind) {
    return element("span", text, `badge ${kind}`);
  }

  function verdict(rollout) {
    if (rollout.reward === null) return badge("not graded", "");
    if (rollout.reward <= 0) return badge("wrong", "wrong");
    return rollout.finish === "stop" ? badge("right", "right") : badge("right, not finished", "flag");
  }

  function listItem(rollout, index) {
    const item = element("li"), first = element("div", undefined, "first");
    item.id = `rollout-${index}`;
    item.setAttribute("role", "option");
    first.append(verdict(rollout), element("span", `${rollout.tokens.toLocaleString("en-US")} tokens`, "grow"));
    if (rollout.finish !== "stop") first.append(badge(ENDED[rollout.finish], "flag"));
    if (rollout.repeats) first.append(badge("repeats", "flag"));
    const where = state.step === ALL ? `step ${rollout.step} · ` : "";
    item.append(first, element("div", `${where}${rollout.snippet}`, "snippet"));
    item.addEventListener("click", () => { list.focus(); choose(index); });
    return item;
  }

  function choose(index) {
    const rollout = state.shown[index];
    [...list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === index)));
    state.chosen = rollout ?? null;
    state.token = -1;
    if (!rollout) {
      list.removeAttribute("aria-activedescendant");
      detail.replaceChildren(element("p", runs[state.run]?.steps.length ? "No rollout matches." : "No rollouts are stored yet."));
      return;
    }
    list.setAttribute("aria-activedescendant", `rollout-${index}`);
    const item = list.children[index];
    if (item.offsetTop < list.scrollTop || item.offsetTop + item.offsetHeight > list.scrollTop + list.clientHeight)
      list.scrollTop = item.offsetTop - list.clientHeight / 2;
    showDetail(rollout, rollout.detail);
  }

  function block(title, text, extra) {
    const heading = element("h5", title), body = element("pre");
    body.tabIndex = 0;
    highlighted(body, text);
    if (extra) heading.append(extra);
    const both = document.createDocumentFragment();
    both.append(heading, body);
    return both;
  }

  // The text with the places marked that match the search.
  function highlighted(target, text) {
    const wanted = state.search.toLowerCase(), lower = text.toLowerCase();
    let from = 0, at;
    while (wanted && lower.length === text.length && (at = lower.indexOf(wanted, from)) >= 0) {
      target.append(text.slice(from, at), element("mark", text.slice(at, at + wanted.length)));
      from = at + wanted.length;
    }
    target.append(text.slice(from));
  }

  // The weight version; of a response that several sampled, the tokens of each.
  function weights({ version, segments }) {
    const number = (n) => n.toLocaleString("en-US");
    return segments?.map(([tokens, its]) => `${number(its)} (${number(tokens)} tokens)`).join(", ") ?? number(version);
  }

  function showDetail(rollout, found) {
    const facts = element("div", undefined, "facts");
    facts.append(verdict(rollout), element("span", `step ${rollout.step.toLocaleString("en-US")}`), element("span", `${rollout.prompt_id} · sample ${rollout.sample}`),
      ...(rollout.turns ? [element("span", `${rollout.turns.toLocaleString("en-US")} turns`)] : []),
      element("span", `${rollout.tokens.toLocaleString("en-US")} tokens`), element("span", ENDED[rollout.finish]),
      element("span", `weights ${weights(rollout)}`), element("span", `compresses ${rollout.compression.toFixed(1)}×`));
    if (rollout.repeats) facts.append(badge(`last ${rollout.repeats.toLocaleString("en-US")} tokens repeat`, "flag"));
    const sides = element("div", undefined, "sides"), left = element("div"), right = element("div");
    left.append(block("Problem", found.prompt), ...contexts(found), ...response(found));
    right.append(block("Gold answer", found.answer ?? "–", verdict(rollout)));
    right.append(block("Golden solution", found.golden ?? "none is stored"));
    sides.append(left, right);
    detail.replaceChildren(facts, sides);
  }

  // The contexts of an episode, each under the one that it continues, and what became of an agent's requests.
  function contexts({ contexts = [], account }) {
    const number = (n) => n.toLocaleString("en-US"), tree = element("ul", undefined, "contexts");
    const items = contexts.map(({ first, last, continues, tokens }) => {
      const item = element("li"), turns = element("button", first === last ? `turn ${first}` : `turns ${first} to ${last}`);
      turns.addEventListener("click", () => detail.querySelector(`[data-turn="${first}"]`)?.scrollIntoView({ block: "center" }));
      item.append(turns, ` ${number(tokens)} tokens${continues ? `, continues turn ${continues}` : ""}`);
      return item;
    });
    contexts.forEach(({ continues }, index) => {
      const parent = items[contexts.findIndex(({ first, last }) => first <= continues && continues <= last)];
      if (parent && !parent.querySelector("ul")) parent.append(element("ul"));
      (parent?.querySelector("ul") ?? tree).append(items[index]);
    });
    return [...(account ? [element("h5", "Account of the agent"), element("p", account, "note")] : []),
      ...(contexts.length ? [element("h5", "Contexts"), tree] : [])];
  }

  function response(found) {
    const available = COLOURINGS.filter(({ key }) => !key || found.values[key]);
    fill($("reader-colour"), available.map(({ key, name }) => [key, name]), state.colour);
    $("reader-colour").disabled = available.length < 2;
    const colouring = available.find(({ key }) => key === state.colour) ?? available[0];
    $("reader-colour").value = colouring.key;
    if (!found.pieces) return [found.turns ? transcript(found.turns) : block("Response", found.text)];
    const heading = element("h5", "Response"), tokens = element("div", undefined, "tokens");
    const readout = element("p", "Point at a token, or focus the response and use the arrow keys.", "readout");
    tokens.tabIndex = 0;
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", "tokens of the response");
    readout.setAttribute("role", "status");
    const values = colouring.key ? found.values[colouring.key] : null;
    const top = values ? strongest(values, colouring.kind) : 1;
    const spans = found.pieces.map((piece, index) => {
      const span = element("span", piece);
      span.dataset.at = index;
      if (values) paint(span, values[index], top, colouring.kind);
      return span;
    });
    const between = (found.turns ?? []).map((turn) => ({ at: turn.at, node: observed(turn) }));
    if (found.gap) between.push({ at: found.gap.at, node: element("span", `\n… ${found.gap.tokens.toLocaleString("en-US")} tokens are left out …\n`, "gap") });
    spans.forEach((span, index) => tokens.append(...between.filter(({ at }) => at === index).map(({ node }) => node), span));
    if (values) heading.append(scale(colouring, top));
    const point = (index) => showValues(readout, found, index);
    tokens.addEventListener("pointerover", ({ target }) => { if (target.dataset.at !== undefined) point(Number(target.dataset.at)); });
    tokens.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -1e9, End: 1e9 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      tokens.querySelector(".at")?.classList.remove("at");
      state.token = Math.min(found.pieces.length - 1, Math.max(0, state.token + by));
      const span = tokens.querySelector(`[data-at="${state.token}"]`);
      span?.classList.add("at");
      span?.scrollIntoView({ block: "nearest" });
      point(state.token);
    });
    return [heading, tokens, readout];
  }

  // What the student read before a turn.
  function observed({ observed, restarts, continues, number }) {
    const from = continues ? ` that continues turn ${continues}` : "";
    const span = element("span", restarts ? `\n… a new context${from} …\n` : "", "observed");
    span.dataset.turn = number;
    highlighted(span, observed);
    return span;
  }

  function transcript(turns) {
    const both = block("Response", ""), body = both.querySelector("pre");
    for (const turn of turns) {
      body.append(observed(turn));
      highlighted(body, turn.text);
    }
    return both;
  }

  // The value that gets the full colour: the 98th percentile, so that single tokens do not pale others.
  function strongest(values, kind) {
    const sizes = values.filter((v) => v !== null).map((v) => strength(v, kind)).sort((a, b) => a - b);
    return sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes.at(-1) || 1;
  }
  const strength = (value, kind) => (kind === "both" ? Math.abs(value) : Math.max(0, kind === "low" ? -value : value));

  function paint(span, value, top, kind) {
    if (value === null || value === undefined) return;
    const alpha = Math.min(1, strength(value, kind) / top) * 0.72;
    if (alpha > 0.015) span.style.background = `rgb(${kind === "both" && value > 0 ? "40 140 220" : "225 95 20"} / ${alpha.toFixed(3)})`;
  }

  function scale({ kind, words }, top) {
    const shown = element("span", undefined, "scale"), bar = element("i");
    const hot = "rgb(225 95 20 / .72)", none = "transparent", cool = "rgb(40 140 220 / .72)";
    bar.style.background = `linear-gradient(90deg, ${{ both: [hot, none, cool], low: [hot, none], high: [none, hot] }[kind].join(",")})`;
    const ends = { both: [-top, top], low: [-top, 0], high: [0, top] }[kind];
    if (words) shown.append(bar, words);
    else shown.append(shortNumber(ends[0]), bar, `${shortNumber(ends[1])} nats`);
    return shown;
  }

  function showValues(readout, found, index) {
    const parts = COLOURINGS.filter(({ key, words }) => key && !words && found.values[key]?.[index] !== null && found.values[key]?.[index] !== undefined)
      .map(({ key, name }) => ` · ${name} ${shortNumber(found.values[key][index])}`);
    const place = found.gap && index >= found.gap.at ? index + found.gap.tokens : index;
    readout.replaceChildren(element("b", JSON.stringify(found.pieces[index])), ` token ${place.toLocaleString("en-US")}`, ...parts);
  }

  function changeStep(by) {
    const select = $("reader-step"), at = select.selectedIndex + by;
    if (at < 0 || at >= select.options.length) return;
    select.selectedIndex = at;
    setStep(select.value);
  }
  function setStep(value) {
    state.step = value === ALL ? ALL : Number(value);
    state.follow = $("reader-step").selectedIndex === $("reader-step").options.length - 1;
    showList();
  }
  function setFilter(name) { state.filter = name; showList(); }
  function setColour(key) { state.colour = key; if (state.chosen) showDetail(state.chosen, state.chosen.detail); }
  const after = (items, item) => items[(items.indexOf(item) + 1) % items.length];
  const move = (by) => choose(Math.min(state.shown.length - 1, Math.max(0, state.shown.indexOf(state.chosen) + by)));

  const KEYS = {
    j: () => move(1), k: () => move(-1), "[": () => changeStep(-1), "]": () => changeStep(1),
    f: () => setFilter(after(Object.keys(FILTERS), state.filter)),
    c: () => setColour(after([...$("reader-colour").options].map((o) => o.value), $("reader-colour").value)),
    "/": () => { reader.scrollIntoView(); $("reader-search").focus(); },
  };
  const LIST_KEYS = { ArrowDown: () => move(1), ArrowUp: () => move(-1), Home: () => choose(0), End: () => choose(state.shown.length - 1) };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === $("reader-search") && event.key === "Escape") return void list.focus();
    if (event.target.matches?.("input, select, textarea")) return;
    const act = (event.target === list && LIST_KEYS[event.key]) || KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  $("step-back").addEventListener("click", () => changeStep(-1));
  $("step-on").addEventListener("click", () => changeStep(1));
  $("reader-step").addEventListener("change", ({ target }) => setStep(target.value));
  $("reader-run").addEventListener("change", ({ target }) => { state.run = Number(target.value); state.step = null; showList(); });
  $("reader-colour").addEventListener("change", ({ target }) => setColour(target.value));
  document.querySelectorAll("[data-filter]").forEach((b) => b.addEventListener("click", () => setFilter(b.dataset.filter)));
  let typing;
  $("reader-search").addEventListener("input", ({ target }) => {
    clearTimeout(typing);
    typing = setTimeout(() => { state.search = target.value; showList(); }, 150);
  });

  // Takes the rollouts that the page holds now; stays at the newest step unless an older one was chosen.
  async function refresh() {
    const newest = runs[state.run]?.steps.at(-1);
    kept = await embedded();
    runs = kept.runs;
    if (runs[state.run]?.steps.at(-1) === newest) return;
    if (state.follow) state.step = null;
    showList();
  }
  window.reader = { refresh };
  refresh().then(() => { showList(); reader.dataset.ready = "yes"; });
})();
