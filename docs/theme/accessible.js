// The theme leaves these to the site: a name for the search, and tables that scroll by keys.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");

// The theme puts tables into these frames at some time after the page was read.
function letTablesScrollByKeys() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
}
letTablesScrollByKeys();
new MutationObserver(letTablesScrollByKeys).observe(document.body, { childList: true, subtree: true });
