// Reads and publishes through `tallyd gateway`.

import http from 'node:http';
import https from 'node:https';
import { GatewayError, ReadError } from './errors.js';
import { parsed } from './url.js';

// The largest number of targets or of events in a request.
const IDS_MAX = 500;
export const EVENTS_MAX = 1_000;

// The gateway did not answer. The gateway may have published the events nevertheless.
export class NoAnswer extends Error {}
// The gateway is unreachable or busy. It has not processed the events.
export class NotSent extends Error {}

export class Gateway {
  #client;
  #options;
  #path;
  #timeoutMs;

  constructor(url, token, timeoutMs) {
    const { protocol, hostname, port, pathname } = parsed('gateway', url);
    const clients = { 'http:': http, 'https:': https, 'unix:': http };
    if (!clients[protocol]) throw new TypeError(`gateway is ${url}, allowed are http://, https:// and unix:///path`);
    this.#client = clients[protocol];
    const isSocket = protocol === 'unix:';
    const address = isSocket ? { socketPath: decodeURIComponent(pathname) } : { hostname: hostname.replace(/^\[|\]$/g, ''), port };
    const headers = { accept: 'application/json', ...(token === undefined ? {} : { authorization: `Bearer ${token}` }) };
    this.#options = { ...address, headers, agent: new this.#client.Agent({ keepAlive: true }) };
    this.#timeoutMs = timeoutMs;
    this.#path = isSocket ? '' : pathname.replace(/\/$/, '');
  }

  async counters(kind, targetIds, metric) {
    const found = new Map();
    for (const ids of chunks(targetIds)) {
      const { counters } = await this.get('/v1/counters', { kind, ids: ids.join(','), metrics: metric });
      for (const counter of counters) found.set(counter.id, counter[metric]);
    }
    return found;
  }

  async likes(kind, targetIds, user) {
    const found = new Map();
    for (const ids of chunks(targetIds)) {
      const { likes } = await this.get('/v1/likes', { user, kind, ids: ids.join(',') });
      for (const { id, liked } of likes) found.set(id, liked);
    }
    return found;
  }

  async get(path, query) {
    const ask = () => this.#call(`${path}?${new URLSearchParams(query)}`, null, this.#timeoutMs);
    // The gateway may have closed an idle connection at this moment.
    const asked = ask().catch((error) => (error.wasIdle ? ask() : Promise.reject(error)));
    const { status, answer } = await asked.catch((error) => {
      const message = `the gateway did not answer (${error.message}): treat the number as unknown, and check that it runs`;
      throw new ReadError(message, { cause: error });
    });
    if (status === 200 && answer !== null && typeof answer === 'object') return answer;
    throw errorOf(status, answer);
  }

  // Publishes events, and resolves with the gateway's decision on each event. Throws NotSent, NoAnswer, or
  // GatewayError if the request is wrong. After NoAnswer the gateway may have published the events: do not send them
  // again.
  async publish(events, timeoutMs, traceparent) {
    const { status, answer } = await this.#call('/v1/events', Buffer.from(JSON.stringify(events)), timeoutMs, traceparent).catch((error) => {
      if (!error.wasSent) throw new NotSent(`no connection (${error.message})`, { cause: error });
      throw new NoAnswer(`no answer (${error.message})`, { cause: error });
    });
    if (answer?.events?.length === events.length) return answer.events;
    const error = errorOf(status, answer);
    if (status === 408 || status === 503) throw new NotSent(error.message, { cause: error });
    throw status >= 500 ? new NoAnswer(error.message, { cause: error }) : error;
  }

  // Sends GET, or POST if there is a body. Resolves with the status and the parsed JSON, or `null` if the answer is not
  // JSON.
  async #call(path, body, timeoutMs, traceparent) {
    const { status, text } = await this.#ask(path, body, timeoutMs, traceparent);
    try {
      return { status, answer: JSON.parse(text) };
    } catch {
      return { status, answer: null };
    }
  }

  #ask(path, body, timeoutMs, traceparent) {
    const trace = traceparent && { traceparent };
    const headers = { ...this.#options.headers, 'content-type': 'application/json', 'content-length': body?.length, ...trace };
    const posted = body && { method: 'POST', headers };
    const options = { ...this.#options, ...posted, path: `${this.#path}${path}` };
    return new Promise((resolve, reject) => {
      const signal = AbortSignal.timeout(Math.max(1, Math.ceil(timeoutMs)));
      const request = this.#client.request({ ...options, signal }, (response) => {
        const parts = [];
        response.on('data', (part) => parts.push(part)).on('error', (error) => reject(Object.assign(error, { wasSent })));
        response.on('end', () => resolve({ status: response.statusCode, text: Buffer.concat(parts).toString() }));
      });
      let wasSent = false;
      request.on('socket', (socket) => {
        if (socket.connecting) socket.once(socket.encrypted ? 'secureConnect' : 'connect', () => (wasSent = true));
        else wasSent = true;
      });
      request.on('error', (error) => {
        const isLate = signal.aborted;
        const failed = isLate ? new Error(`no answer in ${Math.ceil(timeoutMs)} ms`) : error;
        reject(Object.assign(failed, { wasSent, wasIdle: request.reusedSocket && !isLate }));
      });
      request.end(body);
    });
  }

  // Closes the connections. Requests in flight still get their answers.
  close() {
    const { agent } = this.#options;
    agent.maxFreeSockets = 0;
    for (const socket of Object.values(agent.freeSockets).flat()) socket.destroy();
  }
}

function* chunks(ids) {
  for (let first = 0; first < ids.length; first += IDS_MAX) yield ids.slice(first, first + IDS_MAX);
}

function errorOf(status, answer) {
  const { code = null, message = 'no explanation' } = answer?.error ?? {};
  return new GatewayError(`the gateway answered ${status} (${code}): ${message}`, status, code);
}
