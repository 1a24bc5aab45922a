"use strict";
// Lays out what Python says. Every text goes in as text, never as HTML.
(() => {
  const byId = (id) => document.getElementById(id);
  const form = byId("question");
  const first = JSON.parse(byId("first").textContent);
  const [status, fault] = [byId("status"), byId("fault")];
  const MOST_BYTES = 256 * 1024 ** 2; // of a file, which Python holds in memory
  const MOST_ROWS = 12; // of a table, before it is asked for all
  const MARKS = { fits: "✓", undecided: "?", fails: "✕" };

  const make = (tag, properties = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const percent = (share) => `${(100 * share).toFixed(3)}%`; // a length of the style sheet
  const say = (text) => { status.textContent = text; };
  const complain = (text) => {
    fault.textContent = text;
    fault.hidden = !text;
    byId("parts").classList.toggle("stale", Boolean(text));
  };

  // --- the question

  const phaseOf = () => form.elements.phase.value;
  const showPhase = () => {
    for (const group of form.querySelectorAll("[data-phase]")) {
      group.hidden = group.disabled = group.dataset.phase !== phaseOf(); // a disabled one is not asked
    }
  };
  const fields = [...form.elements].filter((field) => field.name);
  const choosers = fields.filter((field) => field.type === "file");
  const asked = () => Object.fromEntries(
    [...new FormData(form)].filter(([name, value]) => typeof value === "string" && value.trim() && value !== defaults.get(name)),
  );
  const chosen = () => choosers.filter((field) => !field.closest("fieldset").disabled && field.files.length);
  const withFiles = (question) => ({ // no name of a file holds a slash
    ...question, ...Object.fromEntries(chosen().map((field) => [field.name, [...field.files].map((file) => file.name).join("/")])),
  });
  const filesOf = () => chosen().flatMap((field) => [...field.files]);
  const fill = (question) => {
    for (const field of fields) {
      if (field.type !== "file") field.value = question[field.name] ?? defaults.get(field.name); // a file stays chosen
    }
    showPhase();
    for (const folded of form.querySelectorAll("details")) {
      const names = [...folded.querySelectorAll("[name]")].map((field) => field.name);
      if (names.some((name) => name in question)) folded.open = true;
    }
  };
  const defaults = new Map(fields.map((field) => [field.name, field.dataset.default ?? ""]));
  const fragment = (question) => `#${new URLSearchParams(question)}`;
  const linked = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

  // --- Python

  let worker = null;
  let id = 0;
  let begun = 0;
  let ready = false;
  let latest = null;
  const ask = (question) => {
    id += 1;
    begun = performance.now();
    document.body.dataset.state = "asked";
    latest = { id, question: JSON.stringify(withFiles(question)), files: filesOf() };
    const large = latest.files.find((file) => file.size > MOST_BYTES);
    if (large) { latest = null; complain(`${large.name}: is larger than 256 MiB; give a part of it, or ask the command line`); document.body.dataset.state = "done"; return; }
    if (!ready) return; // asked when it is: a worker that still loads would lose it
    say("computing");
    worker.postMessage(latest);
  };
  const start = () => {
    const module = new URL(first.hasSnapshot ? "worker.js?snapshot" : "worker.js", document.baseURI).href;
    // from a blob, so that the policy of this page holds in the worker, too
    const code = `import(${JSON.stringify(module)}).catch((error) => postMessage({ fault: String(error) }));`;
    worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })), { type: "module" });
    worker.addEventListener("error", () => failed("the worker did not start"));
    worker.addEventListener("message", ({ data }) => {
      if (data.fault) failed(data.fault);
      else if (data.ready) started();
      else if (data.id === id && data.done) { say("ready"); document.body.dataset.state = "done"; }
      else if (data.id === id) show(data.part);
    });
  };
  const started = () => {
    ready = true;
    performance.mark("ready");
    say(latest ? "computing" : "ready");
    if (latest) worker.postMessage(latest);
  };
  const failed = (text) => {
    say("not ready");
    complain(`Python did not start: ${text}`);
    document.body.dataset.state = "failed";
  };

  // --- the answer

  let measured = 0;
  const show = (part) => {
    if (part.part === "refusal") { complain(part.text); return; }
    complain("");
    SHOW[part.part](part);
    if (id !== measured) { // the first part
      measured = id;
      performance.measure("answer", { start: begun, end: performance.now() });
    }
    document.body.dataset.state = part.part;
    document.body.dataset.id = id;
  };
  const clear = (...ids) => { for (const each of ids) byId(each).replaceChildren(); };
  const copied = (text, label) => {
    const shown = make("code", { textContent: text });
    const button = make("button", { type: "button", textContent: "copy", ariaLabel: `copy ${label}` });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
      } catch { // not allowed here: the reader copies what is selected
        getSelection().selectAllChildren(shown);
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
    return make("p", { className: "copy" }, shown, button);
  };
  const headline = (verdict, words, title) => {
    byId("headline").replaceChildren(
      make("p", { className: `verdict ${verdict}` }, make("span", { className: "mark", ariaHidden: "true", textContent: MARKS[verdict] }), words),
      make("h2", { textContent: title }),
    );
  };
  const again = (commands) => [
    make("h2", { textContent: "The same elsewhere" }),
    ...commands.map((command) => copied(command, "the command")),
    copied(new URL(location.href).href, "the link"),
    ...(chosen().length ? [make("p", { className: "about", textContent: "The link carries no file: who opens it chooses the file again." })] : []),
  ];

  const showRun = (part) => {
    headline(part.verdict, part.headline, `${part.title} on ${part.gpu}`);
    const bar = make("div", { className: "bytes", role: "img", ariaLabel: `${part.need} of ${part.usable}: ${part.bytes.map((each) => `${each.name} ${each.size}`).join(", ")}` });
    for (const each of part.bytes) {
      const piece = make("span", { className: `piece part-${each.kind}`, title: `${each.name} ${each.size}` });
      piece.style.width = percent(each.width);
      bar.append(piece);
    }
    const limit = make("span", { className: "limit", title: `the card: ${part.usable}` });
    limit.style.left = percent(part.limit);
    const bounds = make("span", { className: "bounds", title: `between ${part.interval}` });
    bounds.style.left = percent(part.bounds[0]);
    bounds.style.width = percent(part.bounds[1] - part.bounds[0]);
    bar.append(limit, bounds);
    const rows = part.bytes.map((each) => make("li", {}, make("span", { className: `swatch part-${each.kind}`, ariaHidden: "true" }), make("span", { className: "name", textContent: each.name }), make("span", { className: "size", textContent: each.size }), make("span", { className: "share", textContent: each.share })));
    rows.push(make("li", { className: "total" }, make("span"), make("span", { className: "name", textContent: "in all" }), make("span", { className: "size", textContent: part.need }), make("span", { className: "share" })));
    const facts = make("dl", { className: "cards" });
    const fact = (name, value, bounds_) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, value, " ", make("small", { textContent: bounds_ })));
    for (const each of part.facts) facts.append(fact(...each));
    facts.append(make("div", { id: "largest" }, make("dt", { textContent: "Largest batch" }), make("dd", { textContent: "…" })));
    byId("detail").replaceChildren(
      ...(part.reason ? [make("p", { className: "reason", textContent: part.reason })] : []),
      bar,
      make("p", { className: "about scale" }, make("span", { textContent: `at its peak, ${part.moment}` }), make("span", { textContent: `the card gives ${part.usable}` })),
      make("ul", { className: "legend" }, ...rows),
      facts,
    );
    const notes = [...part.notes.map((text) => make("li", { textContent: text })), make("li", { textContent: `basis: ${part.basis}` })];
    const open = byId("more").querySelector("details[open]") !== null;
    byId("more").replaceChildren(
      make("h2", { textContent: "Notes" }),
      make("ul", { className: "reasons" }, ...notes),
      ...again(part.commands),
      make("details", { open }, make("summary", { textContent: "The answer as JSON" }), make("pre", { id: "document", textContent: part.document, tabIndex: 0 })),
    );
  };
  const showLargest = (part) => {
    byId("largest")?.replaceChildren(make("dt", { textContent: part.name }), make("dd", {}, part.value, " ", make("small", { textContent: part.note })));
  };

  let allRows = false;
  let byCost = false; // the order of the cards
  const table = (title, about, part, first = []) => {
    const shown = allRows ? part.rows : part.rows.slice(0, MOST_ROWS);
    const head = make("tr", {}, ...part.columns.map((name, i) => make("th", { scope: "col", className: i ? "number" : "", textContent: name })));
    const body = shown.map((row) => {
      const link = make("a", { href: fragment(row.question), textContent: row.name });
      return make("tr", { className: row.verdict }, make("th", { scope: "row" }, link), ...row.cells.map((text) => make("td", { className: "number", textContent: text })));
    });
    const all = make("button", { type: "button", textContent: `show all ${part.rows.length}`, hidden: shown.length === part.rows.length });
    all.addEventListener("click", () => { allRows = true; table(title, about, part, first); });
    const scroll = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
    byId("table").replaceChildren(make("h2", { textContent: title }), make("p", { className: "about", textContent: about }), ...first, scroll, all);
  };
  const notesList = (notes) => (notes.length ? [make("h2", { textContent: "Notes" }), make("ul", { className: "reasons" }, ...notes.map((text) => make("li", { textContent: text })))] : []);
  const showCards = (part) => {
    const all = part.done === part.of;
    if (part.is_answer) {
      const [card, price] = part.cheapest;
      if (card) headline("fits", `Cheapest: ${card}, ${price}`, part.title);
      else if (all) headline("fails", "No card with a price surely fits", part.title);
      else byId("headline").replaceChildren(make("h2", { textContent: part.title }));
      byId("detail").replaceChildren(...(part.cheapest_hour ? [make("p", { className: "about", textContent: part.cheapest_hour })] : []));
      byId("more").replaceChildren(...notesList(part.notes), ...again(part.commands));
    }
    const cheapest = part.cheapest.length && !part.is_answer ? [make("p", { className: "cheapest", textContent: `Cheapest: ${part.cheapest.join(", ")}; ${part.cheapest_hour}` })] : [];
    const order = make("button", { type: "button", ariaPressed: String(byCost), textContent: "cheapest first" });
    order.addEventListener("click", () => { byCost = !byCost; showCards(part); byId("order")?.focus(); });
    order.id = "order";
    const place = new Map(part.cheapest_first.map((name, i) => [name, i]));
    const rows = byCost || part.is_answer ? [...part.rows].sort((a, b) => place.get(a.name) - place.get(b.name)) : part.rows;
    table(
      "On every card",
      !all ? `${part.done} of ${part.of} cards so far` : `The ${byCost || part.is_answer ? "cheapest" : "smallest"} that fits comes first; a name asks about that card.`,
      { ...part, rows },
      [...cheapest, ...(part.is_answer ? [] : [make("p", { className: "order" }, order)])],
    );
  };
  const showCompare = (part) => {
    headline(part.verdict, part.headline, part.title);
    clear("detail");
    table("Beside each other", [part.about, "A name takes one apart."].filter(Boolean).join(". "), part);
    const open = byId("more").querySelector("details[open]") !== null;
    byId("more").replaceChildren(
      ...notesList(part.notes),
      ...again(part.commands),
      make("details", { open }, make("summary", { textContent: "The answer as JSON" }), make("pre", { id: "document", textContent: part.document, tabIndex: 0 })),
    );
  };
  const showModels = (part) => {
    const last = part.done === part.of;
    if (part.title) headline("fits", "The largest that trains", `${part.title} on ${part.gpu}`);
    else if (last) headline("fails", "No model of the list surely fits", `on ${part.gpu}`);
    else byId("headline").replaceChildren(make("h2", { textContent: `Models on ${part.gpu}` }));
    clear("detail");
    const about = last ? "The largest that fits comes first; a name takes it apart. Type any other model above." : `${part.done} of ${part.of} models so far`;
    table(`Models on ${part.gpu}, ${part.usable}`, [part.about, about].filter(Boolean).join(". "), part);
    byId("more").replaceChildren(...part.notes.map((text) => make("p", { className: "about", textContent: text })), ...again(part.commands));
  };
  const SHOW = { run: showRun, largest: showLargest, compare: showCompare, cards: showCards, models: showModels };

  // --- what the reader does

  let last = "";
  const submit = () => {
    const question = asked();
    const stamp = [fragment(question), ...chosen().flatMap((field) => [field.name, ...[...field.files].map((file) => `${file.name} ${file.size} ${file.lastModified}`)])].join("\n");
    if (stamp === last) return;
    last = stamp;
    history.replaceState(null, "", fragment(question));
    allRows = false;
    ask(question);
  };
  form.addEventListener("change", () => { showPhase(); submit(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); last = ""; submit(); byId("answer").scrollIntoView({ block: "nearest" }); });
  form.addEventListener("reset", () => setTimeout(() => { showPhase(); submit(); }));
  // A file that is dropped anywhere goes to the field that takes its kind.
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length || choosers.includes(event.target)) return; // a field takes its own
    event.preventDefault();
    const ending = event.dataTransfer.files[0].name.replace(/.*\./, ".").toLowerCase();
    const takes = [...choosers].reverse().find((field) => field.accept.split(",").includes(ending));
    if (!takes) { complain(`${event.dataTransfer.files[0].name}: is neither training data nor a file of another tool; accepted: ${choosers.map((field) => field.accept).join(",")}`); return; }
    takes.files = event.dataTransfer.files;
    submit();
  });
  addEventListener("hashchange", () => {
    if (location.hash === last.split("\n")[0]) return;
    fill(linked());
    submit();
    byId("answer").focus();
    scrollTo({ top: byId("answer").offsetTop < innerHeight ? 0 : byId("answer").offsetTop });
  });

  if (location.protocol === "file:") {
    failed("a browser loads none of its files from a folder; serve it, such as with: python -m http.server");
    return;
  }
  if (location.hash.length > 1) fill(linked());
  showPhase();
  last = fragment(asked());
  const isFirst = last === fragment(first.question);
  if (isFirst) show(first.answer); // computed when the page was built
  start();
  if (!isFirst) ask(asked());
})();
