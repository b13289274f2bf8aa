// The light and dark theme: runs before the first paint, so that a remembered choice does not flash.
// It is a classic script for that reason, and has a scope of its own.
{
  const key = "tilewright.theme";
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");

  // Storage may be forbidden (private mode, blocked cookies); the choice then lasts as long as the page.
  const remembered = (): string | null => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null;
    }
  };
  const remember = (theme: string): void => {
    try {
      localStorage.setItem(key, theme);
    } catch {
      root.dataset["themeStored"] = "false";
    }
  };

  const isDark = (): boolean => (root.dataset["theme"] ?? (systemDark.matches ? "dark" : "light")) === "dark";

  const choice = remembered();
  if (choice === "light" || choice === "dark") root.dataset["theme"] = choice;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme") as HTMLButtonElement;
    const show = (): void => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      root.dataset["theme"] = theme;
      remember(theme);
      show();
    });
    systemDark.addEventListener("change", show);
    show();
  });
}
