// The functions change an element only if its content must change. So a user can read, select and copy the unchanged
// elements. All data of the daemon is inserted as text, never as markup.

const byId = (id) => document.getElementById(id);

/** The daemon's time, which is frozen while the page shows old values. */
const time = { offset: 0, stopped: null };
const liveNow = () => Date.now() * 1000 + time.offset;
const knownNow = () => time.stopped ?? liveNow();

/** An element with attributes and children. */
function make(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// A cell consists of texts and of elements that these functions make.
const ago = (at) => ({ at, words: (now) => `${spoken((now - at) / 1e6)} ago` });
const lasting = (at) => ({ at, words: (now) => spoken((now - at) / 1e6) });
const ahead = (at) => ({ at, words: (now) => (at > now ? `in ${spoken((at - now) / 1e6)}` : "now") });
const styled = (style, text) => ({ style, text });
const command = (text) => ({ command: text });
const progress = (part) => ({ part });
const link = (text, href) => ({ text, href });

function part(of) {
  if (typeof of === "string") return make("span", {}, of);
  if (of.words) {
    const element = make("time", { datetime: new Date(of.at / 1000).toISOString(), title: utc(of.at) }, of.words(knownNow()));
    element.words = of.words;
    return element;
  }
  if (of.href) return make("a", { href: of.href, target: "_blank", rel: "noopener noreferrer" }, of.text);
  if (of.command) return make("code", {}, of.command);
  if (of.part !== undefined) return make("progress", { max: "1", value: String(of.part), "aria-label": "done" });
  return make("span", { class: of.style }, of.text);
}

/** Sets the parts of an element, with spaces between them, if they have changed. */
function put(element, parts, title = "") {
  const told = JSON.stringify([parts.map((of) => (of.words ? [of.at, of.words.toString()] : of)), title]);
  if (element.told === told) return;
  element.told = told;
  element.replaceChildren(...parts.flatMap((of, place) => (place ? [" ", part(of)] : [part(of)])));
  if (title) element.title = title;
  else element.removeAttribute("title");
}

/** Creates or updates a child of `parent` for each item, in the order of the items. A key identifies an item. */
function keyed(parent, items, key, create, change) {
  const known = new Map([...parent.children].map((child) => [child.key, child]));
  const seen = new Set();
  items.forEach((item, place) => {
    let name = key(item);
    while (seen.has(name)) name += "'";
    seen.add(name);
    const child = known.get(name) ?? create(item);
    child.key = name;
    known.delete(name);
    change(child, item);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  known.forEach((child) => child.remove());
}

/**
 * Shows a section's summary beside its heading. Opens the section when a problem begins, and closes it when the
 * problem ends.
 */
function fold(id, bad, words) {
  const section = byId(id);
  put(section.querySelector(".summed"), [styled(bad ? "mild" : "muted", `${bad ? "! " : ""}${words}`)]);
  if (section.bad !== bad) section.open = bad;
  section.bad = bad;
}

/** Sets a table's rows: `cells` returns the parts of each column. The first column is the row's header. */
function rows(id, items, key, cells, nothing) {
  const table = byId(id);
  const heads = [...table.tHead.rows[0].cells];
  const all = items.length ? items.map((item) => ({ key: key(item), cells: cells(item) })) : [{ key: "", nothing }];
  keyed(table.tBodies[0], all, (row) => row.key, (row) => newRow(row, heads), (element, row) => {
    if (row.nothing) return put(element.cells[0], [row.nothing]);
    row.cells.forEach((parts, place) => {
      put(element.cells[place], parts);
      element.cells[place].classList.toggle("none", parts.length === 0);
    });
  });
}

function newRow(row, heads) {
  if (row.nothing) {
    return make("tr", { role: "row", class: "empty" }, make("td", { role: "cell", colspan: String(heads.length) }));
  }
  const cells = heads.map((head, place) =>
    place === 0
      ? make("th", { role: "rowheader", scope: "row", class: head.className })
      : make("td", { role: "cell", "data-label": head.textContent, class: head.className }),
  );
  return make("tr", { role: "row" }, ...cells);
}

/** Updates all relative times. */
function tick() {
  for (const element of document.querySelectorAll("time")) {
    const words = element.words?.(element.closest(".known") ? knownNow() : liveNow());
    if (words && element.textContent !== words) element.textContent = words;
  }
}
