// The page as a talk: one section at a time, what waits in it one key later. #talk in the address begins it.
"use strict";
{
  const sections = [...document.querySelectorAll("main > section")].filter(section =>
    section.querySelector(".cell:not(.skip)"));
  const start = document.getElementById("talk");
  const place = document.createElement("div"), parts = document.createElement("select"), count = document.createElement("output");
  const headed = [...sections.keys()].filter(i => sections[i].querySelector("h1, h2, h3"));
  let now = 0;

  const LATER = ".fragment, .long";           // a result that was asked to be predicted, or has no room under its code
  const waiting = () => [...sections[now].querySelectorAll(LATER)].filter(cell => !cell.classList.contains("told"));
  const fit = on => {                         // a slide taller than the screen is drawn smaller
    const {style} = sections[now];
    for (const section of sections) section.style.zoom = "";
    for (let zoom = 1; on && zoom > 0.6 && document.documentElement.scrollHeight > innerHeight; zoom -= 0.04)
      style.zoom = zoom - 0.04;
  };
  const show = (at, all) => {
    now = Math.min(sections.length - 1, Math.max(0, at));
    sections.forEach((section, i) => section.classList.toggle("now", i === now));
    sections[now].querySelectorAll(LATER).forEach(cell => cell.classList.toggle("told", all));
    parts.value = headed.findLast(i => i <= now);
    count.textContent = `${now + 1} / ${sections.length}`;
    history.replaceState(null, "", `#talk-${now + 1}`);
    fit(true);
    scrollTo(0, 0);
  };
  const step = by => {
    if (by > 0 && waiting().length) {
      waiting()[0].classList.add("told");
      fit(true);
    }
    else if (sections[now + by]) show(now + by, by < 0);
  };
  const talk = on => {
    document.body.classList.toggle("talk", on);
    start.textContent = on ? "Read" : "Slides";
    if (on) return show(now, false);
    fit(false);
    history.replaceState(null, "", location.pathname + location.search);
    sections[now].scrollIntoView();
  };

  for (const i of headed) parts.add(new Option(sections[i].querySelector("h1, h2, h3").textContent, i));
  for (const [name, shown, by] of [["Previous slide", "‹", -1], ["Next slide", "›", 1]]) {
    const button = document.createElement("button");
    Object.assign(button, {type: "button", textContent: shown, onclick: () => step(by)});
    button.setAttribute("aria-label", name);
    place.append(button);
  }
  parts.setAttribute("aria-label", "Part of the chapter");
  parts.onchange = () => { show(+parts.value, false); parts.blur(); };
  place.className = "place";
  place.append(parts, count);
  start.before(place);
  start.onclick = () => talk(!document.body.classList.contains("talk"));

  const moves = {ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1};
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const on = document.body.classList.contains("talk"), {key} = event;
    const presses = key === "Enter" || key === " ", takes = "input, select, textarea" + (presses ? ", button, summary, a" : "");
    const busy = event.target.closest(takes) && !key.startsWith("Page");
    if (key === "s" && !on && !busy) talk(true);
    else if (key === "Escape" && on) talk(false);
    else if (on && !busy && moves[key]) step(moves[key]);
    else if (on && !busy && key === "Home") show(0, false);
    else if (on && !busy && key === "End") show(sections.length - 1, true);
    else return;
    event.preventDefault();
  });
  const asked = () => {
    const found = location.hash.match(/^#talk(?:-(\d+))?$/);
    if (!found) return;
    now = Math.min(sections.length, Math.max(1, found[1] ?? 1)) - 1;
    talk(true);
  };
  addEventListener("resize", () => fit(document.body.classList.contains("talk")));
  addEventListener("hashchange", asked);
  asked();
}
