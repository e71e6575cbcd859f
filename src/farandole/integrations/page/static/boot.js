// Shows the rest of the page, and loads its modules, once its head has been painted: so it is visible at once.

let hasBegun = false;

function begin() {
  if (hasBegun) return;
  hasBegun = true;
  document.documentElement.classList.add("ready");
  import("/static/page.js");
}

requestAnimationFrame(() => setTimeout(begin));
setTimeout(begin, 200); // a tab in the background has no frames
