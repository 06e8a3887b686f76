// Shared by all panels: numbers as text, colours, tables, legends, bars.

const { h, render } = preact;
const { useEffect, useLayoutEffect, useRef, useState } = preactHooks;
const html = htm.bind(h);
const root = document.documentElement;

// Numbers formatted for people; an unknown one is a dash.
const NOTHING = "\u2013",
  SPACE = "\u00a0";
const isNumber = (value) => typeof value === "number";
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 12 });

function figure(value, digits = 3) {
  if (value === null || value === undefined) return NOTHING;
  if (!isNumber(value))
    return { nan: "not a number", inf: "∞", "-inf": "-∞" }[value] || String(value);
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e12)) return value.toExponential(digits - 1);
  const rounded = size >= 10 ** digits ? Math.round(value) : Number(value.toPrecision(digits));
  return plain.format(rounded);
}

function count(value, noun) {
  return figure(value) + " " + noun + (value === 1 ? "" : "s");
}

function percent(share) {
  return isNumber(share)
    ? (100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + SPACE + "%"
    : NOTHING;
}

function duration(s) {
  if (!isNumber(s)) return NOTHING;
  if (s < 1e-4) return Math.round(s * 1e6) + SPACE + "µs";
  if (s < 0.9995) return Number((s * 1e3).toPrecision(3)) + SPACE + "ms";
  if (s < 60) return Number(s.toPrecision(3)) + SPACE + "s";
  const two = (n) => String(n).padStart(2, "0"),
    whole = Math.round(s),
    hours = Math.floor(whole / 3600);
  return (
    (hours ? hours + ":" + two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)) +
    ":" +
    two(whole % 60)
  );
}

function bytes(amount) {
  if (!isNumber(amount)) return NOTHING;
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, amount)) / 3)));
  return (
    (amount / 1000 ** power).toFixed(power ? 1 : 0) + SPACE + ["B", "kB", "MB", "GB", "TB"][power]
  );
}

function moment(seconds) {
  const when = new Date(isNumber(seconds) ? 1000 * seconds : NaN);
  return isNaN(when) ? "unknown" : when.toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// Colours: the system's choice until the button is pressed. A canvas reads its colours when drawn, and is
// drawn again when they change.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const repaints = new Set(),
  colours = new Map();

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
}

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  colours.clear();
  for (const repaint of repaints) repaint();
}

systemDark.addEventListener("change", () => setTheme(root.dataset.theme));
let chosen;
addEventListener("beforeprint", () => {
  chosen = root.dataset.theme;
  setTheme("light");
}); // paper is light
addEventListener("afterprint", () => setTheme(chosen));

function onRepaint(repaint) {
  repaints.add(repaint);
  return () => repaints.delete(repaint);
}

function colourOf(look, variable = "--look") {
  const key = look + variable;
  if (!colours.has(key)) colours.set(key, readColour(look, variable));
  return colours.get(key);
}

function readColour(look, variable) {
  const probe = document.createElement("i");
  probe.className = "look-" + look;
  probe.style.color = "var(" + variable + ")";
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function Theme() {
  const [dark, setDark] = useState(isDark());
  useEffect(() => onRepaint(() => setDark(isDark())), []);
  return html`<button
    type="button"
    id="theme"
    aria-label=${dark ? "Use light colours" : "Use dark colours"}
    onClick=${() => setTheme(dark ? "light" : "dark")}
  >
    ${dark ? "Light" : "Dark"}
  </button>`;
}

// The frame of a page: a line that stays visible, links to the sections, and the sections themselves.
function Frame({ label, summary, links, footer, children }) {
  useLayoutEffect(() => {
    root.dataset.ready = "true";
  }, []);
  return html`<header class="top">
      <div class="top-inner">
        <span class="brand">Paceline</span>
        <div class="summary">${summary}</div>
        <${Theme} />
      </div>
    </header>
    <div class="columns">
      <nav class="side" aria-label=${label}>
        <ul>
          ${links.map(([name, title]) => html`<li><a href=${"#" + name}>${title}</a></li>`)}
        </ul>
      </nav>
      <div class="content">
        <main id="main">${children}</main>
        <footer>
          <p>${footer}</p>
        </footer>
      </div>
    </div>`;
}

// Elements that several panels use.
function Table({ caption, head, rows, words = [0] }) {
  useLayoutEffect(setStops);
  const look = (column) => (words.includes(column) ? "" : "number");
  return html`<div class="scroll" role="region" aria-label=${caption}>
    <table>
      <caption>
        ${caption}
      </caption>
      <thead>
        <tr>
          ${head.map((cell, i) => html`<th class=${look(i)} scope="col">${cell}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              ${row.map((cell, i) => html`<td class=${look(i)}>${cell}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Legend({ entries }) {
  return html`<ul class="legend">
    ${entries.map(
      ([look, name, meaning]) =>
        html`<li>
          <svg viewBox="0 0 12 12" class=${"swatch look-" + look} aria-hidden="true">
            <rect width="12" height="12" rx="2" class="fill" />
          </svg>
          <b>${name}</b> ${meaning}
        </li>`,
    )}
  </ul>`;
}

// Stacked bars, one per row: a name, its pieces (style, share of the width, words) and a value.
function Bars({ rows }) {
  return html`<ul class="bars">
    ${rows.map(
      ([name, pieces, value]) =>
        html`<li>
          <span class="bar-label">${name}</span>
          <${Bar} pieces=${pieces} />
          <span class="bar-value">${value}</span>
        </li>`,
    )}
  </ul>`;
}

function Bar({ pieces }) {
  let x = 0;
  return html`<svg
    viewBox="0 0 1000 22"
    class="bar"
    preserveAspectRatio="none"
    role="img"
    aria-label=${pieces.map((each) => each[2]).join(", ")}
  >
    ${pieces.map(([look, share, said]) => {
      x += 1000 * share;
      return html`<rect
        key=${look}
        x=${x - 1000 * share}
        width=${Math.max(1000 * share - 1.5, 0.8)}
        height="22"
        class=${"fill look-" + look}
        ><title>${said}</title></rect
      >`;
    })}
  </svg>`;
}

// Buttons to the previous and the next of several things; without `last` these are a circle.
function Steps({ names, place, now, last, go }) {
  const button = (look, label, sign, goal) =>
    html`<button
      type="button"
      class=${look}
      aria-label=${label}
      title=${label}
      disabled=${isNumber(last) && (goal < 0 || goal > last)}
      onClick=${() => go(goal)}
    >
      ${sign}
    </button>`;
  return html`${button("back", names[0], "◀", now - 1)}
    <span class="place" role="status">${place}</span>
    ${button("next", names[1], "▶", now + 1)}`;
}

function Note({ children }) {
  return html`<p class="note">${children}</p>`;
}

function more(shown, inAll, noun) {
  return inAll > shown && html`<${Note}>${"… and " + count(inAll - shown, noun) + " more."}<//>`;
}

// Only tables that are wider than the page need a tab stop, to be scrolled by keyboard. Panels request the
// check, and it runs once per frame, when the browser has computed the widths anyway.
let stopsAsked = 0;

function setStops() {
  stopsAsked =
    stopsAsked ||
    requestAnimationFrame(() => {
      stopsAsked = 0;
      const boxes = [...document.querySelectorAll(".scroll")],
        areWide = boxes.map((box) => box.scrollWidth > box.clientWidth);
      boxes.forEach((box, i) =>
        areWide[i] ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex"),
      );
    });
}

addEventListener("resize", setStops);

// In a notebook the page is in a frame, where links would lead to the notebook's address.
addEventListener("click", (event) => {
  const link = location.href === "about:srcdoc" && event.target.closest('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  const goal = document.getElementById(link.hash.slice(1));
  if (goal) goal.scrollIntoView();
});
