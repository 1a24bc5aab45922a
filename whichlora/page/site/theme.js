"use strict";
// before anything is painted: the colours of the system
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
  dark.addEventListener("change", apply);
  apply();
})();
