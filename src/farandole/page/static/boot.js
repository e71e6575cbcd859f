// Loads the page's modules once its frame has been painted: what is there without data is visible at once.

let hasBegun = false;

function begin() {
  if (hasBegun) return;
  hasBegun = true;
  import("/static/page.js");
}

requestAnimationFrame(() => setTimeout(begin));
setTimeout(begin, 200); // a tab in the background has no frames
