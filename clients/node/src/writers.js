// Reads which numbers API servers count. Daemons announce these numbers in Redis. Clients follow the announcement, so a
// site can change whether the daemon or API servers count.

import { within } from './waiting.js';

// The client uses an answer for at most this time.
const EVERY_MS = 10_000;
// How long a publish waits for an answer.
const READ_MAX_MS = 500;

export class Writers {
  #read;
  #now;
  // A daemon of an older version does not list numbers for API servers, and counts all numbers itself.
  #known = { byApi: new Set() };
  #reading = null;
  #wasRead = false;
  #dueAt = 0;

  // `read` reads the announcement in Redis.
  constructor(read, now = () => performance.now()) {
    this.#read = read;
    this.#now = now;
  }

  // Returns the names of the numbers that API servers count. While Redis answers, the announcement is at most ten
  // seconds old. Only one call asks Redis. Until Redis answers, other calls use the known announcement. If none is
  // known, these calls wait.
  async byApi() {
    const isDue = this.#now() >= this.#dueAt;
    if (isDue) {
      this.#dueAt = this.#now() + EVERY_MS;
      this.#reading = this.#ask();
    }
    if (isDue || !this.#wasRead) await this.#reading;
    return at(this.#known, Date.now() * 1_000);
  }

  async #ask() {
    try {
      this.#known = announced(await within(this.#read(), READ_MAX_MS)) ?? this.#known;
    } catch {
      // If Redis does not answer, use the last known names.
    }
    this.#wasRead = true;
  }
}

// Reads an announcement such as {"api": ["video:like"]}. Returns `null` if the text has another form. During a change,
// the announcement also has the next names, and the instant (in microseconds since the epoch) at which all clients
// change.
export function announced(text) {
  const answer = JSON.parse(text);
  if (!Array.isArray(answer?.api)) return null;
  const byApi = new Set(answer.api);
  const isChange = Array.isArray(answer.next) && Number.isInteger(answer.from);
  return isChange ? { byApi, nextByApi: new Set(answer.next), fromUs: answer.from } : { byApi };
}

// Returns the names of the numbers that API servers count at an instant.
export function at({ byApi, nextByApi, fromUs }, nowUs) {
  return nextByApi && nowUs >= fromUs ? nextByApi : byApi;
}
