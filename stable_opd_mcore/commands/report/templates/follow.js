// Keeps the page up to date: asks whether it has changed, then takes its content and rollouts again.
// A server that is gone for a while is asked again.
"use strict";
(() => {
  const SECONDS = 2;
  const status = document.getElementById("status"), content = document.getElementById("content");
  let version = document.body.dataset.follow;

  function say(text, kind) {
    status.textContent = text;
    status.className = `pill ${kind}`;
  }

  // Replaces the content; sections that were opened or closed stay as they are.
  async function take(text) {
    const open = new Map([...content.querySelectorAll("details[data-key]")].map((d) => [d.dataset.key, d.open]));
    const whole = new DOMParser().parseFromString(text, "text/html"), fresh = whole.getElementById("content");
    fresh.querySelectorAll("details[data-key]").forEach((d) => { d.open = open.get(d.dataset.key) ?? d.open; });
    const focus = document.activeElement?.closest?.("#content .plot")?.getAttribute("aria-label");
    content.replaceChildren(...fresh.childNodes);
    document.getElementById("rollout-data").textContent = whole.getElementById("rollout-data").textContent;
    window.page.show();
    if (focus) [...content.querySelectorAll(".plot")].find((p) => p.getAttribute("aria-label") === focus)?.focus({ preventScroll: true });
    await window.reader.refresh();
  }

  async function look() {
    try {
      const reply = await fetch("./", { headers: { "If-None-Match": version }, cache: "no-store" });
      if (reply.status === 200) {
        await take(await reply.text());
        version = reply.headers.get("ETag");
      }
      say("following", "good");
    } catch {
      say("no answer; is stable-opd report --follow still running?", "bad");
    }
    setTimeout(look, SECONDS * 1000);
  }
  look();
})();
