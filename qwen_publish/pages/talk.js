// The page as a talk: one screen at a time, what waits in it one key later. #talk in the address begins it.
"use strict";
{
  const start = document.getElementById("talk"), main = document.querySelector("main");
  const place = document.createElement("div"), parts = document.createElement("select"), count = document.createElement("output");
  let screens = [], headed = [], now = 0;

  const ROOM = 620;                           // pixels of height for cells: 720, less the bar and the margins
  const LATER = ".fragment, .long";           // a result that was asked to be predicted, or has no room under its code
  const waiting = () => [...screens[now].querySelectorAll(LATER)].filter(cell => !cell.classList.contains("told"));

  // Screens of 1280 x 720, whatever the window, so that a number means the same slide everywhere: a section goes on
  // with another where a cell has no room, and a cell that has none alone shows first its code, then its result.
  const split = () => {
    main.style.width = "1240px";
    const sections = main.querySelectorAll("section"), fragments = main.querySelectorAll(".fragment");
    for (const section of sections) section.classList.add("now");
    for (const cell of fragments) cell.classList.add("told");
    const boxes = [...main.querySelectorAll(".cell:not(.skip)")].map(cell => [cell, cell.getBoundingClientRect()]);
    let section, first;
    for (const [cell, {top, bottom}] of boxes) {
      if (cell.parentElement === section && bottom - first > ROOM) {
        const rest = document.createElement("section"), cells = [...section.children];
        rest.append(...cells.slice(cells.indexOf(cell)));
        section.after(rest);
        cell.classList.remove("fragment");
      }
      if (cell.parentElement !== section) [section, first] = [cell.parentElement, top];
      if (bottom - top > ROOM && cell.querySelector(":scope > .highlight + *")) cell.classList.add("long");
    }
    main.style.width = "";
    screens = [...main.querySelectorAll("section")].filter(section => section.querySelector(".cell:not(.skip)"));
    headed = [...screens.keys()].filter(i => screens[i].querySelector("h1, h2, h3"));
    for (const i of headed) parts.add(new Option(screens[i].querySelector("h1, h2, h3").textContent, i));
  };
  const fit = () => {                         // a slide taller than the window is drawn smaller
    const {style} = screens[now];
    style.zoom = "";
    for (let zoom = 1; zoom > 0.6 && document.documentElement.scrollHeight > innerHeight; zoom -= 0.04)
      style.zoom = zoom - 0.04;
  };
  const show = (at, all) => {
    screens[now].style.zoom = "";
    now = Math.min(screens.length - 1, Math.max(0, at));
    screens.forEach((screen, i) => screen.classList.toggle("now", i === now));
    screens[now].querySelectorAll(LATER).forEach(cell => cell.classList.toggle("told", all));
    parts.value = headed.findLast(i => i <= now);
    count.textContent = `${now + 1} / ${screens.length}`;
    history.replaceState(null, "", `#talk-${now + 1}`);
    fit();
    scrollTo(0, 0);
  };
  const step = by => {
    if (by > 0 && waiting().length) {
      waiting()[0].classList.add("told");
      fit();
    }
    else if (screens[now + by]) show(now + by, by < 0);
  };
  const talking = () => document.body.classList.contains("talk");
  const talk = (on, at = now) => {
    document.body.classList.toggle("talk", on);
    start.textContent = on ? "Read" : "Slides";
    if (on && !screens.length) split();
    if (on) return show(at, false);
    screens[now].style.zoom = "";
    history.replaceState(null, "", location.pathname + location.search);
    screens[now].scrollIntoView();
  };

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
  start.onclick = () => talk(!talking());

  const moves = {ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1};
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const on = talking(), {key} = event;
    const presses = key === "Enter" || key === " ", takes = "input, select, textarea" + (presses ? ", button, summary, a" : "");
    const busy = event.target.closest(takes) && !key.startsWith("Page");
    if (key === "s" && !on && !busy) talk(true);
    else if (key === "Escape" && on) talk(false);
    else if (on && !busy && moves[key]) step(moves[key]);
    else if (on && !busy && key === "Home") show(0, false);
    else if (on && !busy && key === "End") show(screens.length - 1, true);
    else return;
    event.preventDefault();
  });
  const asked = () => {
    const found = location.hash.match(/^#talk(?:-(\d+))?$/);
    if (found) talk(true, (found[1] ?? 1) - 1);
  };
  addEventListener("resize", () => talking() && fit());
  addEventListener("hashchange", asked);
  addEventListener("load", asked);            // when pictures have their heights
}
