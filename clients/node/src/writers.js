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
  #byApi = new Set();
  #reading = null;
  #wasRead = false;
  #dueAt = 0;

  // `read` reads the announcement in Redis.
  constructor(read, now = () => performance.now()) {
    this.#read = read;
    this.#now = now;
  }

  // Returns the names of the numbers that API servers count. While Redis answers, the names are at most ten seconds
  // old. Only one call asks Redis. Until Redis answers, other calls use the known names. If no names are known, these
  // calls wait.
  async byApi() {
    const isDue = this.#now() >= this.#dueAt;
    if (isDue) {
      this.#dueAt = this.#now() + EVERY_MS;
      this.#reading = this.#ask();
    }
    if (isDue || !this.#wasRead) await this.#reading;
    return this.#byApi;
  }

  async #ask() {
    try {
      this.#byApi = announced(await within(this.#read(), READ_MAX_MS)) ?? this.#byApi;
    } catch {
      // If Redis does not answer, use the last known names.
    }
    this.#wasRead = true;
  }
}

// Returns the names in an announcement such as {"api": ["video:like"]}. Returns `null` if the text has another form.
export function announced(text) {
  const numbers = JSON.parse(text)?.api;
  return Array.isArray(numbers) ? new Set(numbers) : null;
}
