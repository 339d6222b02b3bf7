// The player of rounds on a page without a kernel. It draws what `draw.round_frame` draws, from the same story.
"use strict";
{
  const make = (tag, name, ...inside) => {
    const element = document.createElement(tag);
    element.className = name;
    element.append(...inside);
    return element;
  };
  const button = (label, shown, click) => {
    const element = make("button", "", shown);
    element.type = "button";
    element.setAttribute("aria-label", label);
    element.onclick = click;
    return element;
  };
  const visible = text => text.replaceAll("\n", "↵").replaceAll(" ", "␣");

  // Each emitted token with its colour: accepted now or before, the model's own now, or earlier text.
  const emitted = ({texts, rounds}, at) => rounds.slice(0, at + 1)
    .flatMap((round, i) => Array.from({length: round.kept}, (_, n) =>
      n < round.accepted ? (i === at ? "accepted" : "before") : i === at ? "plain" : ""))
    .map((kind, n) => make("span", `token ${kind}`, visible(texts[n]))).slice(-36);

  const row = (name, tokens, kind) => make("tr", "", make("th", "", name),
    ...tokens.map((token, n) => make("td", "", token === null ? "" : make("span", kind(n), token))));

  const frame = (story, at) => {
    const now = story.rounds[at], {accepted, kept} = now, cut = Math.max(0, now.draft.length - kept);
    const share = rows => `${100 * rows / (1.3 * story.rounds.at(-1).pos)}%`;
    const bar = (rows, cut) => {
      const line = make("div", "bar", make("i", "", `${rows}`), make("b", ""));
      line.children[0].style.width = share(rows);
      line.children[1].style.width = share(cut);
      return line;
    };
    return [
      make("p", "tokens", ...emitted(story, at)),
      make("div", now.rolled_back ? "work back" : "work", make("table", "",
        row(at ? "draft" : "", now.draft, n => n === 0 ? "from" : n <= accepted ? "right" : "wrong"),
        row("the model", [null, ...now.model], n => n <= accepted ? "right" : n <= kept ? "own" : "unread")),
        make("p", "verdict", now.verdict)),
      make("p", "tally", now.tally),
      make("div", "caches", make("span", "", "K/V, model"), bar(now.pos, cut), make("div", "state", now.origin),
        make("span", "", "K/V, head"), bar(now.head, 0))];
  };

  for (const data of document.querySelectorAll("script.rounds")) {
    const story = JSON.parse(data.textContent), last = story.rounds.length - 1;
    const title = make("h3", ""), picture = make("div", ""), slider = make("input", ""), place = make("output", "");
    let timer;
    const show = at => {
      slider.value = at;
      title.textContent = story.rounds[at].title;
      place.textContent = `${at} of ${last}`;
      picture.replaceChildren(...frame(story, at));
    };
    const pause = () => {
      clearInterval(timer);
      timer = undefined;
      play.textContent = "▶";
      play.setAttribute("aria-label", "Play");
    };
    const go = at => { pause(); show(Math.min(last, Math.max(0, at))); };
    const tick = () => +slider.value < last ? show(+slider.value + 1) : pause();
    const play = button("Play", "▶", () => {
      if (timer) return pause();
      if (+slider.value === last) show(0);
      timer = setInterval(tick, 900);
      play.textContent = "❚❚";
      play.setAttribute("aria-label", "Pause");
    });
    Object.assign(slider, {type: "range", min: 0, max: last, oninput: () => go(+slider.value)});
    slider.setAttribute("aria-label", "round");
    title.setAttribute("aria-live", "polite");
    data.parentElement.replaceChildren(make("div", "player", make("div", "controls", play,
      button("Back", "‹", () => go(+slider.value - 1)), slider,
      button("Next", "›", () => go(+slider.value + 1)), place), title, picture));
    show(story.start);
  }
}
