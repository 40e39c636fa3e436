// The numbers that API servers count, as daemons announce them in Redis. Clients follow, so that a site can change it.

import { within } from './waiting.js';

// The longest age of an answer.
const EVERY_MS = 10_000;
// How long a publish waits for an answer.
const READ_MAX_MS = 500;

export class Writers {
  #read;
  #now;
  // An older daemon announces nothing, and counts everything.
  #byApi = new Set();
  #reading = null;
  #wasRead = false;
  #dueAt = 0;

  // `read` resolves with the text in Redis.
  constructor(read, now = () => performance.now()) {
    this.#read = read;
    this.#now = now;
  }

  // The numbers as of the last ten seconds. One call asks Redis. The others continue with the known numbers, but wait
  // for the first answer.
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
      // If Redis does not answer, the known numbers stay in force.
    }
    this.#wasRead = true;
  }
}

// The announced numbers, for instance of {"api": ["video:like"]}. `null` if the text is something else.
export function announced(text) {
  const numbers = JSON.parse(text)?.api;
  return Array.isArray(numbers) ? new Set(numbers) : null;
}
