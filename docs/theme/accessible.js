// The theme leaves these to the site: a name for the search, and tables that scroll by keys.
const mend = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
