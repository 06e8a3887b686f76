// What the theme's own script puts into a page, for those who use it by keyboard or by ear: a table
// that scrolls can be reached, and the buttons of a block of code are no part of the navigation.
new MutationObserver(() => {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])"))
    part.tabIndex = 0;
  for (const part of document.querySelectorAll("nav.md-code__nav:not([role])"))
    part.setAttribute("role", "presentation");
}).observe(document.body, {childList: true, subtree: true});
