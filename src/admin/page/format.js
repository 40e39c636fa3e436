// Formats numbers and times as text. Times of the daemon are in microseconds since the epoch.

const GROUPED = new Intl.NumberFormat("en-US");

/** 1,234,567; a question mark for an unknown number. */
function count(value) {
  return value === null || value === undefined ? "?" : GROUPED.format(value);
}

/** 0.25, 7.1, 512, 12,345. */
function rate(value) {
  return value < 10 ? `${Number(value.toPrecision(2))}` : GROUPED.format(Math.round(value));
}

/** 3 ms, 1.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h. */
function span(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 0.0095) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1).replace(/\.0$/, "")} s`;
  return spoken(seconds);
}

/** A duration in at most two units. The smallest unit is a second. */
function spoken(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  if (minutes > 0) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}

function bytes(value) {
  return `${GROUPED.format(Math.round(value / 1e6))} MB`;
}

/** 2026-11-22 02:41:10 UTC. */
function utc(micros) {
  return `${new Date(micros / 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** 02:41:10. */
function clock(micros) {
  return new Date(micros / 1000).toISOString().slice(11, 19);
}
