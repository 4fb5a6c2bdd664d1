// The theme leaves these to the site: a name for the search, and tables that scroll by keys.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
