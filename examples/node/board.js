// Leaderboards: computes the keys of periods, and packs two numbers into a score. docs/scripts.md has the scripts that
// write and read leaderboards.

const SCORE_BITS = 53;
const DAY_MS = 86_400_000;
const DAYS = ['monday', 'tuesday', 'wednesday', 'thursday', 'friday', 'saturday', 'sunday'];

// Returns the name of the period that contains an instant in milliseconds since 1970. A week is named after the ISO
// week that has most of its days.
export function periodOf(length, instant, timeZone = 'UTC', weekStarts = 'monday') {
  if (length === 'total') return 'total';
  // Use the Swedish locale, because it writes dates in the ISO format.
  const options = { timeZone, calendar: 'iso8601', year: 'numeric', month: '2-digit', day: '2-digit' };
  const day = new Intl.DateTimeFormat('sv', options).format(instant);
  if (length !== 'week') return length === 'day' ? day : day.slice(0, 7);
  // From here on, compute with dates only, which have no time zone.
  const shift = DAYS.indexOf(weekStarts);
  const date = Date.parse(day) - (shift < 4 ? shift : shift - 7) * DAY_MS;
  // The week belongs to the year of its Thursday.
  const thursday = date + (3 - ((new Date(date).getUTCDay() + 6) % 7)) * DAY_MS;
  const year = new Date(thursday).getUTCFullYear();
  const week = Math.floor((thursday - Date.UTC(year, 0, 1)) / DAY_MS / 7) + 1;
  return `${year}-W${String(week).padStart(2, '0')}`;
}

export const boardKey = (name, period, keyPrefix = 'tally:') => `${keyPrefix}board:{${name}}:${period}`;

// Returns the keys of a board's periods that contain the instant. One call of lua/board.lua adds to all these keys.
export function boardKeys(name, periods, instant, keyPrefix = 'tally:') {
  return periods.map((period) => boardKey(name, periodOf(period, instant), keyPrefix));
}

// Packs two numbers into a score, as lua/board.lua does: into the 53 bits that a double holds exactly. For a plain
// board, lowBits is 0.
export function pack(primary, low, lowBits) {
  if (!(low >= 0 && low < 2 ** lowBits && primary >= 0 && primary < 2 ** (SCORE_BITS - lowBits))) {
    throw new RangeError(`${primary} and ${low} do not fit`);
  }
  return primary * 2 ** lowBits + low;
}

// Returns the two numbers in a score.
export function unpack(score, lowBits) {
  const primary = Math.floor(score / 2 ** lowBits);
  return [primary, score - primary * 2 ** lowBits];
}
