// Asks MySQL, with an end to every wait.

import mysql from 'mysql2/promise';

export class Late extends Error {}

// The promise, or an error where it takes longer.
export function within(promise, timeoutMs) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Late(`no answer in ${timeoutMs} ms`)), timeoutMs);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

export class Rows {
  #pool;
  #timeoutMs;
  #restMs;
  #restsUntil = 0;

  // `restMs`: for how long a MySQL that failed is not asked again. Others need not wait for it, too.
  constructor(uri, timeoutMs, restMs) {
    const big = { supportBigNumbers: true, bigNumberStrings: true };
    // Connects when it is first asked.
    this.#pool = mysql.createPool({ uri, connectionLimit: 10, connectTimeout: timeoutMs, ...big });
    this.#timeoutMs = timeoutMs;
    this.#restMs = restMs;
  }

  async query(sql, values) {
    if (Date.now() < this.#restsUntil) throw new Error('MySQL failed a moment ago, and is not asked');
    const waiting = this.#pool.getConnection();
    let connection;
    try {
      connection = await within(waiting, this.#timeoutMs);
      const [rows] = await within(connection.query(sql, values), this.#timeoutMs);
      connection.release();
      return rows;
    } catch (error) {
      this.#restsUntil = Date.now() + this.#restMs;
      // Not back into the pool: its answer may still come.
      if (connection) connection.destroy();
      else waiting.then((late) => late.release(), () => {});
      throw error;
    }
  }

  end() {
    return this.#pool.end();
  }
}
