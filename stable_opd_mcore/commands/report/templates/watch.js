// Keeps the live view up to date: asks whether files have changed, then takes the page's content again.
// A server or a run that is gone for a while is asked again.
"use strict";
(() => {
  const SECONDS = 2;
  const status = document.getElementById("status"), content = document.getElementById("content");
  let version = null;

  function duration(seconds) {
    if (seconds < 100) return `${Math.round(seconds)} s`;
    if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
    return `${(seconds / 3600).toFixed(1)} h`;
  }

  function say(text, kind) {
    status.textContent = text;
    status.className = `pill ${kind}`;
  }

  function showState(runs) {
    const started = runs.filter((run) => run.step !== null);
    if (!started.length) return say("waiting for the first step", "");
    const [run] = started.sort((a, b) => a.age - b.age);
    const done = run.total !== null && run.step >= run.total;
    const parts = [runs.length > 1 ? run.label : "", `step ${run.step.toLocaleString("en-US")}${run.total === null ? "" : ` of ${run.total.toLocaleString("en-US")}`}`];
    parts.push(done ? "finished" : `${duration(run.age)} ago`);
    if (!done && run.left !== null) parts.push(`about ${duration(run.left)} left`);
    say(parts.filter(Boolean).join(" · "), done || run.age < 600 ? "good" : "bad");
  }

  // Replaces the content; sections that were opened or closed stay as they are.
  async function takeContent() {
    const text = await (await fetch("./")).text();
    const open = new Map([...content.querySelectorAll("details[data-key]")].map((d) => [d.dataset.key, d.open]));
    const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("content");
    fresh.querySelectorAll("details[data-key]").forEach((d) => { d.open = open.get(d.dataset.key) ?? d.open; });
    const focus = document.activeElement?.closest?.("#content .plot")?.getAttribute("aria-label");
    content.replaceChildren(...fresh.childNodes);
    window.page.show();
    if (focus) [...content.querySelectorAll(".plot")].find((p) => p.getAttribute("aria-label") === focus)?.focus({ preventScroll: true });
  }

  async function look() {
    try {
      const found = await (await fetch("version")).json();
      showState(found.runs);
      if (version !== null && version !== found.version) await takeContent();
      version = found.version;
      await window.reader.refresh(found.runs);
    } catch {
      say("no answer; is stable-opd watch still running?", "bad");
    }
    setTimeout(look, SECONDS * 1000);
  }
  look();
})();
