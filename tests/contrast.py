"""A question to a browser: which text on a page is too faint to be read by everybody?"""

from __future__ import annotations

TOO_FAINT = """() => {
  // Every visible piece of text whose contrast with what is behind it is below WCAG's 4.5.
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.getClientRects().length) continue;
    if (element.closest("script, style, :disabled, title")) continue;
    const style = getComputedStyle(element);
    const own = parse(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(own), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(element.className.toString() + ": " + element.textContent);
  }
  return found;
}"""
