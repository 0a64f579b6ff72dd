// Numbers as text, by the rules of ragfuse.types.sizes. No line breaks between a number and its unit.

export function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (n >= 999.5 && at < units.length - 1) {
    n /= 1000;
    at += 1;
  }
  return `${n < 9.95 && at ? n.toFixed(1) : Math.round(n)}\u00a0${units[at]}`;
}

// A capacity as text: a whole number of TiB, GiB or MiB, such as 20 GiB, or else as bytes() writes sizes.
export function capacity(n) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"]]) {
    if (n && n % unit === 0) return `${count(n / unit)}\u00a0${name}`;
  }
  return bytes(n);
}

export function count(n) {
  return Math.round(n).toLocaleString("en");
}

export function many(n, one, several = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : several}`;
}

export function seconds(s) {
  return `${s.toFixed(s < 10 ? 2 : 1)}\u00a0s`;
}

export function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "none yet";
}

export function ago(unix) {
  const s = Math.max(0, Date.now() / 1000 - unix);
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  return s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
}
