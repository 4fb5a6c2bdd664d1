// The theme leaves these to the site: a name for the search, and what scrolls by keys: tables, and
// the pictures on a phone.
const mend = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const picture of document.querySelectorAll(".md-typeset p > img:only-child")) {
    if (matchMedia("(max-width: 600px)").matches) picture.parentElement.tabIndex = 0;
  }
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
