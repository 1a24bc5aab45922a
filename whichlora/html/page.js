"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { points, columns, filters, winner } = data;
  const byId = (id) => document.getElementById(id);
  const PAGE = 200; // rows of the table shown at first
  const PRINT_WIDTH = 680;
  const escaped = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const wrapped = (text) => escaped(text).replace(/(.{60}[^ ]*) /g, "$1<br>");
  const shownText = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const sortValue = (cell) => (Array.isArray(cell) ? cell[0] : cell);

  const oneDevice = filters.find((one) => one.key === "gpu").values.length < 2;
  // an interval stands in the cell of its value
  const isInterval = columns.map((column) => column.title.startsWith("Interval"));
  const hidden = columns.map((column, i) => isInterval[i] || (column.title === "Device" && oneDevice));
  const hover = points.map((point) => {
    const lines = [];
    point.cells.forEach((cell, i) => {
      const [title, text] = [columns[i].title, shownText(cell)];
      if (i === 0 || text === "" || text === "–") return;
      if (isInterval[i]) lines.push(`${lines.pop()} (${escaped(text)})`);
      else if (!hidden[i]) lines.push(wrapped(`${title.toLowerCase()}: ${text}`));
    });
    return `<b>${escaped(point.model)}</b> ${point.stage}<br>${lines.join("<br>")}`;
  });

  // --- filters

  const form = byId("filters");
  for (const { key, title, values } of filters) {
    if (values.length < 2) continue;
    // many values are folded away: twenty models would fill a telephone's screen
    const many = values.length > 8;
    const group = document.createElement(many ? "details" : "fieldset");
    const legend = document.createElement(many ? "summary" : "legend");
    legend.textContent = many ? `${title} (${values.length})` : title;
    group.append(legend);
    for (const value of values) {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true, defaultChecked: true, name: key, value });
      label.append(box, ` ${value}`);
      group.append(label);
    }
    form.insertBefore(group, byId("count"));
  }
  let visible = points.map(() => true);
  const applyFilters = () => {
    const off = [...form.querySelectorAll("input:not(:checked)")].map((box) => [box.name, box.value]);
    visible = points.map((point) => !off.some(([key, value]) => point[key] === value));
    byId("count").textContent = `${visible.filter(Boolean).length} of ${points.length} candidates`;
    redraw();
    fillTable();
  };
  form.addEventListener("change", applyFilters);
  form.addEventListener("reset", () => setTimeout(applyFilters));

  // --- figures: drawn when they come into view, and again when something changed

  const keep = (values, wanted) => (Array.isArray(values) ? values.filter((_, i) => wanted[i]) : values);
  const filtered = (trace) => {
    if (!trace.customdata || trace.type === "bar") return trace;
    const wanted = trace.customdata.map((i) => visible[i]);
    const bars = (error) => error && { ...error, array: keep(error.array, wanted), arrayminus: keep(error.arrayminus, wanted) };
    const kept = {
      ...trace,
      x: keep(trace.x, wanted),
      y: keep(trace.y, wanted),
      customdata: keep(trace.customdata, wanted),
    };
    if (trace.marker) kept.marker = { ...trace.marker, symbol: keep(trace.marker.symbol, wanted) };
    if (trace.text) kept.text = keep(trace.text, wanted);
    if (trace.textfont) kept.textfont = { ...trace.textfont, color: keep(trace.textfont.color, wanted) };
    if (trace.error_x) kept.error_x = bars(trace.error_x);
    if (trace.error_y) kept.error_y = bars(trace.error_y);
    if (!trace.hoverinfo && !trace.hovertemplate) {
      kept.hovertext = kept.customdata.map((i) => hover[i]);
      kept.hovertemplate = "%{hovertext}<extra></extra>";
    }
    return kept;
  };
  let chosen = null;
  const withChosen = (trace) => {
    if (chosen === null || !trace.customdata) return trace;
    const bars = [chosen, ...trace.customdata.filter((i) => i !== chosen)].slice(0, 8);
    const names = bars.map((i) => escaped(points[i].name).replace(", ", "<br>"));
    if (trace.type !== "bar") return { ...trace, x: bars.map((i) => points[i].peak), y: names, customdata: bars };
    const sizes = bars.map((i) => points[i].bytes[trace.meta.part] || 0);
    return { ...trace, x: sizes, y: names, text: sizes.map(bytes), customdata: bars };
  };
  // only for parts of a candidate chosen here; every other text comes from whichlora
  const bytes = (size) => {
    const [unit, scale] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, s]) => size >= s) || ["B", 1];
    const value = size / scale;
    return unit === "B" ? `${Math.trunc(size)} B` : `${value.toFixed(value < 100 ? 2 : 1)} ${unit}`;
  };
  const narrow = matchMedia("(max-width: 640px)");
  // two plots beside each other stand one above the other where the page is narrow
  const stacked = (layout) => ({
    ...layout,
    xaxis: { ...layout.xaxis, domain: [0, 1] },
    xaxis2: { ...layout.xaxis2, domain: [0, 1] },
    yaxis: { ...layout.yaxis, domain: [0.58, 1] },
    yaxis2: { ...layout.yaxis2, domain: [0, 0.42] },
  });
  const fitted = (figure) => {
    const target = byId(figure.id);
    target.style.height = "";
    if (!narrow.matches) return figure.layout;
    const pair = "xaxis2" in figure.layout;
    const entries = figure.data.filter((trace) => trace.showlegend !== false).length;
    const plots = pair ? 640 : 380; // pixels, and below them the legend, two entries in a row or one
    const legend = 60 + 30 * entries;
    target.style.height = `${plots + legend}px`;
    const layout = pair ? stacked(figure.layout) : figure.layout;
    return { ...layout, legend: { ...layout.legend, y: -70 / plots, yanchor: "top" } };
  };
  const themed = (layout, printing) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: true };
    const result = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: printing ? 10 : 12 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--text") }, hoverlabel: { align: "left", bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } } };
    for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) result[key] = { ...axis, ...layout[key] };
    const limit = (item) => (item.color === "#C03028" ? { ...item, color: colour("--bad") } : item);
    result.shapes = (layout.shapes || []).map((one) => ({ ...one, line: limit(one.line) }));
    result.annotations = (layout.annotations || []).map((one) => ({ ...one, font: limit(one.font), bgcolor: colour("--back") }));
    if (printing) Object.assign(result, { width: PRINT_WIDTH, height: 380 });
    return result;
  };
  const drawn = new Set();
  const draw = (figure, printing = false) => {
    const target = byId(figure.id);
    if (printing) target.style.height = ""; // paper has a height of its own
    const traces = figure.id === "breakdown" ? figure.data.map(withChosen) : figure.data.map(filtered);
    // plotly writes into what it is given
    Plotly.react(target, structuredClone(traces), structuredClone(themed(printing ? figure.layout : fitted(figure), printing)), { responsive: !printing, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] });
    if (!drawn.has(figure.id)) {
      drawn.add(figure.id);
      target.on("plotly_click", ({ points: [point] }) => {
        if (figure.id !== "breakdown" && typeof point.customdata === "number") choose(point.customdata);
      });
    }
  };
  const stale = new Set(data.figures.map((figure) => figure.id));
  const inView = new Set();
  const redraw = () => {
    for (const figure of data.figures) {
      stale.add(figure.id);
      drawIfNeeded(figure);
    }
  };
  const drawIfNeeded = (figure) => {
    if (!inView.has(figure.id) || !stale.has(figure.id)) return;
    stale.delete(figure.id);
    draw(figure);
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) { inView.delete(target.id); continue; }
      inView.add(target.id);
      drawIfNeeded(data.figures.find((figure) => figure.id === target.id));
    }
  }, { rootMargin: "200px" });
  for (const figure of data.figures) watcher.observe(byId(figure.id));

  // --- bytes of any candidate

  const chooser = byId("chooser");
  const hasBytes = (i) => Object.keys(points[i].bytes).length > 0;
  const choose = (i) => {
    if (!chooser || (i !== null && !hasBytes(i))) return;
    chosen = i;
    chooser.value = i === null ? "" : String(i);
    byId("unchoose").hidden = i === null;
    stale.add("breakdown");
    const figure = data.figures.find((one) => one.id === "breakdown");
    drawIfNeeded(figure);
  };
  if (chooser) {
    chooser.append(new Option("the best ones", ""));
    points.forEach((point, i) => { if (hasBytes(i)) chooser.append(new Option(point.name, i)); });
    chooser.addEventListener("change", () => choose(chooser.value === "" ? null : Number(chooser.value)));
    byId("unchoose").addEventListener("click", () => choose(null));
  }

  // --- table

  const table = byId("table");
  let sorted = { column: null, direction: 1 };
  let limit = PAGE;
  const heading = table.tHead.insertRow();
  columns.forEach((column, i) => {
    if (hidden[i]) return;
    const cell = document.createElement("th");
    cell.scope = "col";
    if (column.number) cell.className = "number";
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: column.title });
    button.addEventListener("click", () => {
      sorted = { column: i, direction: sorted.column === i ? -sorted.direction : 1 };
      for (const other of heading.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", sorted.direction > 0 ? "ascending" : "descending");
      fillTable();
    });
    cell.append(button);
    heading.append(cell);
  });
  const compare = (a, b) => {
    const [left, right] = [sortValue(points[a].cells[sorted.column]), sortValue(points[b].cells[sorted.column])];
    return sorted.direction * (left < right ? -1 : left > right ? 1 : 0);
  };
  // what a cell says, and in small letters below it what makes the column wide
  const split = (i, j) => {
    const text = shownText(points[i].cells[j]);
    if (columns[j].title === "Model") return [text.split("/").pop(), text.split("/").slice(0, -1).join("/")];
    if (columns[j].title === "Variant") return [text.split(", ")[0], text.split(", ").slice(1).join(", ")];
    const bounds = isInterval[j + 1] ? shownText(points[i].cells[j + 1]) : "–";
    return [text, bounds === "–" ? "" : bounds];
  };
  function fillTable() {
    const order = points.map((_, i) => i).filter((i) => visible[i]);
    const before = (i) => (i === winner ? 0 : points[i].stage === "fine-tuning" ? 1 : 2);
    if (sorted.column === null) order.sort((a, b) => before(a) - before(b));
    else order.sort(compare);
    const body = document.createElement("tbody");
    for (const i of order.slice(0, limit)) {
      const row = body.insertRow();
      if (points[i].wins) row.className = "wins";
      points[i].cells.forEach((content, j) => {
        if (hidden[j]) return;
        const cell = row.insertCell();
        if (columns[j].number) cell.className = "number";
        if (columns[j].title === "Why") cell.className = "why";
        const [text, detail] = split(i, j);
        if (j > 0 || !chooser || !hasBytes(i)) cell.textContent = text;
        else {
          const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title: "what its bytes are" });
          button.addEventListener("click", () => { choose(i); byId("section-breakdown").scrollIntoView(); chooser.focus({ preventScroll: true }); });
          cell.append(button);
        }
        if (detail) cell.append(" ", Object.assign(document.createElement("small"), { textContent: detail }));
      });
    }
    table.tBodies[0].replaceWith(body);
    const left = order.length - limit;
    byId("more").hidden = left <= 0;
    byId("more").textContent = `show ${left} more`;
  }
  byId("more").addEventListener("click", () => { limit = Infinity; fillTable(); });

  // --- theme and print

  const dark = matchMedia("(prefers-color-scheme: dark)");
  let theme = null; // what the reader chose; null follows the system
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "light" : "dark";
  };
  const current = () => theme || (dark.matches ? "dark" : "light");
  byId("theme").addEventListener("click", () => { theme = current() === "dark" ? "light" : "dark"; setTheme(theme); redraw(); });
  narrow.addEventListener("change", redraw);
  dark.addEventListener("change", () => { setTheme(current()); redraw(); });
  addEventListener("beforeprint", () => {
    setTheme("light");
    for (const figure of data.figures) draw(figure, true);
  });
  addEventListener("afterprint", () => {
    setTheme(current());
    for (const figure of data.figures) byId(figure.id).style.width = byId(figure.id).style.height = "";
    redraw();
  });

  setTheme(current());
  applyFilters();
})();
