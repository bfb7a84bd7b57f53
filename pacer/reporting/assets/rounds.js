// The round viewer. All that it shows is in the JSON of the page, made by pacer/reporting/rounds.py, where the short keys
// of a round are explained (`_round`).
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const PARTS = [["draft"], ["preverify", "pre-verify"], ["intermediate"], ["target"], ["rest"]]; // and their names
  const MARKS = { a: "✓", u: "?", r: "✗", x: "·", z: "end" };
  const LEAST = 24; // columns of the overview, so that a short text has no broad ones
  const now = { run: null, request: null, round: 0, token: 0, stop: "" };
  let spans = []; // tokens of the shown text, in order

  const piece = (id) => now.run.texts[id] ?? `⟨${id}⟩`;
  const kept = (round) => [...round.f].filter((fate) => "au".includes(fate)).length; // of the drafted tokens

  /** A token's text with what is invisible made visible; breaks: in running text, where a line may end. */
  function inked(id, breaks) {
    const parts = piece(id).split(/([\n\t])/).filter(Boolean).flatMap((part) => {
      if (part === "\n") return [node("span", { class: "mark" }, "↵"), breaks ? "\n" : ""];
      if (part === "\t") return [node("span", { class: "mark" }, "⇥"), breaks ? "\t" : ""];
      return [breaks ? part : part.replace(/^ | $/g, "\u00a0")];
    });
    return parts.length ? parts : [node("span", { class: "mark" }, "∅")];
  }
  const token = (id, look) => node("span", { class: `t ${look}` }, ...inked(id, false));

  // ---- which request

  function fill(select, options, chosen) {
    select.replaceChildren(...options.map(([value, text]) => node("option", { value }, text)));
    if (options.some(([value]) => value === chosen)) select.value = chosen;
  }
  const named = (values) => [...new Set(values)].map((value) => [value, value]);

  /** The arm a reader wants to see first: one whose estimates are known, else one that drafts. */
  function telling(requests) {
    const signs = [(r) => r.s, (r) => r.in, (r) => r.d.length];
    const rank = (request) => signs.findIndex((sign) => request.rounds.some(sign)) >>> 0; // none: last
    return [...requests].sort((a, b) => rank(a) - rank(b))[0]?.arm;
  }

  function choose() {
    now.run = data.runs[Number(by("pick-run").value || 0)];
    const all = now.run.requests;
    fill(by("pick-benchmark"), named(all.map((r) => r.benchmark)), by("pick-benchmark").value);
    const here = all.filter((r) => r.benchmark === by("pick-benchmark").value);
    fill(by("pick-request"), named(here.map((r) => r.name)), by("pick-request").value);
    const arms = here.filter((r) => r.name === by("pick-request").value);
    fill(by("pick-arm"), named(arms.map((r) => r.arm)), by("pick-arm").value || telling(arms));
    now.request = arms.find((r) => r.arm === by("pick-arm").value);
    const rounds = now.request.rounds;
    const counts = new Map();
    for (const round of rounds) counts.set(round.w, (counts.get(round.w) ?? 0) + 1);
    const reasons = [...counts].map(([w, n]) => [String(w), `${now.run.stops[w][1]} (${n})`]);
    fill(by("pick-stop"), [["", `all (${rounds.length})`], ...reasons], by("pick-stop").value);
    now.stop = by("pick-stop").value;
    drawText();
    drawOverview();
    drawWorth();
    go(shown(1) ? 1 : Math.max(0, next(-1, 1))); // the first with a draft
  }

  const shown = (k) => k in now.request.rounds && (now.stop === "" || String(now.request.rounds[k].w) === now.stop);
  function next(from, step) {
    for (let k = from + step; k in now.request.rounds; k += step) if (shown(k)) return k;
    return -1;
  }

  // ---- the text, and an overview of its rounds

  function drawText() {
    spans = [];
    const groups = now.request.rounds.map((round, k) => {
      const tokens = round.e.map((id, place) => {
        const look = { class: `t ${round.o[place]}`, role: "option", tabindex: -1, "aria-selected": false };
        const span = Object.assign(node("span", look, ...inked(id, true)), { round: k, place, number: spans.length });
        spans.push(span);
        return span;
      });
      const name = shown(k) ? "round" : "round off";
      return node("span", { class: name, role: "group", "aria-label": `round ${k}` }, ...tokens);
    });
    by("text").replaceChildren(...(groups.length ? groups : [now.request.text]));
    by("text").scrollTop = 0;
  }

  function drawOverview() {
    const rounds = now.request.rounds;
    const columns = Math.max(rounds.length, LEAST);
    const tallest = Math.max(1, ...rounds.map((round) => round.d.length));
    const box = (k, n) => (n ? `M${k + 0.12} ${tallest}v${-n}h0.76v${n}z` : "");
    const path = (name, size, on) =>
      node("path", { class: name, d: rounds.map((r, k) => (shown(k) === on ? box(k, size(r)) : "")).join("") });
    const paths = [true, false].flatMap((on) =>
      [path(on ? "drafted" : "drafted off", (r) => r.d.length, on), path(on ? "kept" : "kept off", kept, on)]);
    const here = node("rect", { id: "here", y: tallest * 1.05, height: tallest / 8, width: 0.76 });
    const label = `Overview of ${plural(rounds.length, "round")}: outline, tokens drafted; filled, accepted`;
    const view = { viewBox: `0 -0.3 ${columns} ${tallest * 1.2 + 0.6}`, preserveAspectRatio: "none" };
    const svg = node("svg", { class: "strip", ...view, role: "img", "aria-label": label }, ...paths, here);
    svg.addEventListener("click", (event) => {
      const place = svg.getBoundingClientRect();
      const k = Math.floor(((event.clientX - place.left) / place.width) * columns);
      if (k in rounds) go(k);
    });
    by("strip").replaceChildren(svg);
  }

  // ---- one round

  function go(k, number) {
    now.round = k;
    const round = now.request.rounds[k];
    by("where").textContent = round ? `Round ${k} of ${now.request.rounds.length - 1}` : "No rounds";
    const nothing = node("p", {}, "This method left no rounds, since another engine ran it: its text alone.");
    by("round").replaceChildren(...(round ? aboutRound(round, k) : [nothing]));
    by("detail").replaceChildren();
    if (!round) return;
    for (const group of by("text").querySelectorAll(".now")) group.classList.remove("now");
    const group = by("text").children[k];
    group.classList.add("now");
    by("here").setAttribute("x", k + 0.12);
    const top = group.getBoundingClientRect().top - by("text").getBoundingClientRect().top;
    if (top < 0 || top > by("text").clientHeight - 48) by("text").scrollTop += top - by("text").clientHeight / 3;
    const first = number ?? spans.findIndex((span) => span.round === k);
    if (first >= 0) look(first);
  }

  function aboutRound(round, k) {
    const rows = [node("h3", {}, `Round ${k}`), node("p", {}, sentence(round))];
    for (const [number, inner] of (round.in ?? []).entries()) {
      rows.push(node("div", { class: "inner" }, soft(`Inner round ${number + 1}: ${sentence(inner)}`), drafted(inner)));
    }
    if (round.in) rows.push(soft("What was passed on to the target, and what became of it:"));
    rows.push(drafted(round));
    if (round.s) rows.push(soft("Above a token: the rule's estimate that it will be accepted (–: not asked)."));
    return [...rows, ...times(round)];
  }

  function sentence(round) {
    const stop = now.run.stops[round.w][1];
    if (round.o[0] === "p") return "The models read the prompt; the target wrote the first token.";
    if (!round.d.length) return `Nothing was drafted (${stop}); the target wrote ${plural(round.e.length, "token")}.`;
    const count = kept(round);
    const verdict = count === round.d.length ? "All were kept" : count ? `${count} kept` : "None was kept";
    const who = round.ms ? "the target" : "the inner verifier";
    const whole = count === round.d.length || round.o.at(-1) === "b";
    const more = whole ? "added one" : "put its own token in place of the refused one";
    const own = round.e.length > count ? `, and ${who} ${more}` : "";
    return `${plural(round.d.length, "token")} drafted, then: ${stop}. ${verdict}${own}.`;
  }

  /** The drafted tokens with the rule's estimates above and what became of them below; then the verifier's own. */
  function drafted(round) {
    const items = round.d.map((id, place) => {
      const [name, meaning] = data.fates[round.f[place]];
      const look = "au".includes(round.f[place]) ? (round.f[place] === "u" ? "u" : round.by[place]) : "gone";
      const below = [token(id, look), node("br"), `${MARKS[round.f[place]]} ${name}`];
      const above = round.s ? estimate(round.s[place] ?? null) : [];
      return node("li", { title: `${name}: ${meaning}` }, ...above, ...below);
    });
    const count = kept(round);
    for (const [place, id] of round.e.slice(count).entries()) {
      const letter = round.o[count + place];
      const [name, meaning] = data.origins[letter];
      const said = letter !== "i" ? name : count < round.d.length ? "in its place" : "added";
      items.push(node("li", { class: "own", title: meaning }, token(id, letter), node("br"), said));
    }
    return node("ul", { class: "draft", "aria-label": "drafted tokens, then the verifier's own" }, ...items);
  }

  function estimate(score) {
    const level = node("i");
    level.style.height = `${100 * Math.min(1, Math.max(0, score ?? 0))}%`;
    const bar = node("span", { class: score === null ? "bar none" : "bar" }, level);
    return [bar, score === null ? "–" : score.toFixed(2), node("br")];
  }

  function times(round) {
    const parts = PARTS.map(([key, name], i) => [key, `${name ?? key} ${seconds(round.ms[i])}`, round.ms[i]]);
    const said = `time of the round: ${parts.map(([, text]) => text).join(", ")}`;
    const bar = node("div", { class: "times", role: "img", "aria-label": said });
    for (const [key, text, ms] of parts) {
      bar.append(node("i", { class: key, title: text }));
      bar.lastChild.style.flexGrow = ms;
    }
    const spent = parts.filter(([, , ms]) => ms > 0);
    const keys = spent.map(([key, text]) => node("span", { class: "part" }, node("i", { class: `key ${key}` }), text));
    const batch = round.rows > 1 ? `, a share of a batch of ${round.rows}` : "";
    return [soft(`Time: ${seconds(sum(round.ms))}${batch}`), bar, soft(...keys)];
  }

  // ---- one token

  function look(number) {
    for (const span of by("text").querySelectorAll(".look")) {
      span.classList.remove("look");
      span.setAttribute("tabindex", -1);
      span.setAttribute("aria-selected", false);
    }
    now.token = number;
    spans[number].classList.add("look");
    spans[number].setAttribute("tabindex", 0);
    spans[number].setAttribute("aria-selected", true);
    tell(spans[number]);
  }

  function tell(span) {
    const round = now.request.rounds[span.round];
    const [id, letter] = [round.e[span.place], round.o[span.place]];
    const [name, meaning] = data.origins[letter];
    const place = span.place < kept(round) && !round.tree ? span.place : null; // in the draft
    const score = place === null ? null : (round.s?.[place] ?? null);
    const facts = [
      `round ${span.round}`, place === null ? "" : `place ${place + 1} of ${round.d.length} in the draft`,
      score === null ? "" : `estimate ${score.toFixed(3)}`, `round took ${seconds(sum(round.ms))}`, `id ${id}`,
    ];
    const said = `${name}: ${meaning}. ${facts.filter(Boolean).join(", ")}.`;
    span.setAttribute("aria-label", `${piece(id)} — ${said}`);
    by("detail").replaceChildren(token(id, letter), ` ${said}`);
  }

  // ---- estimates against what happened

  function drawWorth() {
    const found = now.run.judged.find((judged) => judged.arm === now.request.arm);
    by("worth").hidden = !found;
    if (!found) return;
    by("worth-text").textContent =
      `${found.arm}, all requests of this run. It stopped ${plural(found.stopped, "draft")}: ${found.whole} were kept ` +
      `whole, so it could have gone on; ${found.late} held refused tokens, ${found.in_vain} drafted in vain.`;
    by("bins").replaceChildren(estimatesChart(found.bins));
  }

  // ---- what a reader does

  function press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.closest("select, input, summary, .scroll")) return; // arrows have a meaning there
    const inText = by("text").contains(event.target);
    const beside = spans[now.token + { ArrowDown: 1, ArrowUp: -1 }[event.key]]; // NaN: no such token
    const to = { ArrowRight: next(now.round, 1), ArrowLeft: next(now.round, -1) }[event.key];
    const end = inText ? { Home: next(-1, 1), End: next(now.request.rounds.length, -1) }[event.key] : undefined;
    if (to >= 0 || end >= 0) go(to ?? end);
    else if (inText && beside) go(beside.round, beside.number);
    else return;
    if (inText) spans[now.token].focus();
    event.preventDefault();
  }
  const touched = (event) => event.target.closest("[role=option]");

  document.addEventListener("keydown", press);
  by("text").addEventListener("mouseover", (event) => touched(event) && tell(touched(event)));
  by("text").addEventListener("mouseleave", () => spans[now.token] && tell(spans[now.token]));
  by("text").addEventListener("click", (event) => {
    const span = touched(event);
    if (!span) return;
    go(span.round, span.number);
    span.focus();
  });
  for (const [name, step] of [["before", -1], ["after", 1]]) {
    by(name).addEventListener("click", () => next(now.round, step) >= 0 && go(next(now.round, step)));
  }
  for (const name of ["run", "benchmark", "request", "arm", "stop"]) {
    by(`pick-${name}`).addEventListener("change", choose);
  }
  fill(by("pick-run"), data.runs.map((run, i) => [String(i), run.name]), "0");
  by("pick-run").parentElement.hidden = data.runs.length < 2;
  choose();
  document.documentElement.dataset.ready = String(Math.round(performance.now())); // ms since the page was asked for
})();
