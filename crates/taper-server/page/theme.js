// Light, dark, or as the system has it. Loaded before the page is drawn, so that it does not flash in the other theme.
(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const stored = () => {
    try {
      return localStorage.getItem("taper-theme");
    } catch {
      return null;
    }
  };
  const set = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  set(themes.includes(stored()) ? stored() : "auto");
  document.addEventListener("DOMContentLoaded", () => {
    set(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
      set(next);
      try {
        localStorage.setItem("taper-theme", next);
      } catch {
        // Then it lasts as long as the page.
      }
    });
  });
})();
