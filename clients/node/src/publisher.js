// Publishes over one long-lived connection.
//
// An outer loop keeps a session open. When the session ends, the loop connects again. A session is one connection with
// one channel in confirm mode. Publishing waits for a session, sends the message and waits for its confirm. If the
// session ends before the confirm, the same body is sent in the next session. The publisher repeats this until the
// deadline.
//
// Events of concurrent calls go as one list, with one confirm (groups.js).

import amqp from 'amqplib';
import { LoginError, NackedError, RejectedError, ReturnedError, UnconfirmedError } from './errors.js';
import { Groups } from './groups.js';
import { parsed } from './url.js';
import { Call, Late, Limit, taken, within } from './waiting.js';

const PAUSE_MIN_MS = 100;
// The longest pause between two attempts to connect. If this pause were longer, a call of `publish` could reach its
// deadline before the client connects again.
const PAUSE_MAX_MS = 1_000;
const CLOSE_MS = 1_000;

class Nack extends Error {}
class Return extends Error {}
// The broker refused the user or the password.
class LoginRefused extends Error {}
// The client was closed during the call.
class Closed extends Error {}
// The session ended before the confirm. The message may have arrived.
class Lost extends Error {}

// One connection. The session ends at the first failure, and is never used again.
class Session {
  blocked = null;
  #connection;
  #channel;
  #silenceMs;
  #error = null;
  #onEnd = null;
  #returned = new Map();
  #pending = new Set();
  #published = 0;
  #heardAt = 0;
  #watch = null;

  static async open(url, silenceMs) {
    const session = new Session();
    session.#silenceMs = silenceMs;
    session.#connection = await amqp.connect(url, { timeout: silenceMs, noDelay: true }).catch((error) => {
      throw error.message === 'connect ETIMEDOUT' ? new Error(`RabbitMQ did not open the connection in ${silenceMs} ms`) : error;
    });
    const failed = (error) => session.#fail(error);
    session.#connection.on('error', failed).on('close', () => failed(new Error('the connection was closed')));
    session.#connection.on('blocked', (reason) => (session.blocked = reason || 'no reason given'));
    session.#connection.on('unblocked', () => Object.assign(session, { blocked: null }).#heard());
    try {
      const late = `RabbitMQ did not open a channel in ${silenceMs} ms`;
      session.#channel = await within(session.#connection.createConfirmChannel(), silenceMs, late);
    } catch (error) {
      session.abort(error);
      throw error;
    }
    session.#channel.on('error', failed).on('close', () => failed(new Error('the channel was closed')));
    session.#channel.on('return', ({ fields, properties }) => session.#returned.set(properties.messageId, fields.replyText));
    return session;
  }

  // Resolves with the error that ended the session. Call it only once.
  ended() {
    return new Promise((resolve) => {
      if (this.#error) resolve(this.#error);
      else this.#onEnd = resolve;
    });
  }

  async publish(call, { exchange, routingKey, body, traceparent }) {
    if (this.#error) throw this.#lost();
    this.#published += 1;
    // `messageId` identifies a message that the broker returns.
    const messageId = String(this.#published);
    const headers = traceparent && { traceparent };
    const options = { contentType: 'application/json', persistent: true, mandatory: true, messageId, headers };
    if (this.#pending.size === 0) this.#heard();
    this.#watch ??= this.#watchIn(this.#silenceMs);
    await call.wait(this.#pending, (entry) => {
      const confirmed = (error) => this.#confirmed(entry, messageId, error);
      this.#channel.publish(exchange, routingKey, body, options, confirmed);
    });
  }

  #confirmed(entry, messageId, error) {
    this.#heard();
    this.#pending.delete(entry);
    // If the broker returns a message, the returned message arrives before the confirm.
    const returned = this.#returned.get(messageId);
    this.#returned.delete(messageId);
    if (returned !== undefined) entry.reject(new Return(returned));
    else if (!error) entry.resolve();
    else if (error.message === 'message nacked') entry.reject(new Nack(error.message));
    // The channel was closed. The channel's `error` event came before this event, and contains the reason.
    else entry.reject(this.#lost(error));
  }

  #lost(error) {
    const cause = this.#error ?? error;
    return new Lost(cause.message, { cause });
  }

  #heard() {
    this.#heardAt = performance.now();
  }

  // A slow broker confirms from time to time. A broker that confirms nothing has stalled, and the connection is
  // dropped.
  #watchIn(ms) {
    return setTimeout(() => {
      this.#watch = null;
      if (this.#pending.size === 0 || this.#error) return;
      const silentMs = performance.now() - this.#heardAt;
      if (this.blocked !== null) this.#watch = this.#watchIn(this.#silenceMs);
      else if (silentMs < this.#silenceMs) this.#watch = this.#watchIn(this.#silenceMs - silentMs + 1);
      else this.abort(new Error(`RabbitMQ confirmed nothing for ${Math.round(silentMs)} ms`));
    }, ms).unref();
  }

  #fail(error) {
    if (this.#error) return;
    this.#end(error);
    this.#leave();
  }

  #end(error) {
    this.#error ??= error;
    clearTimeout(this.#watch);
    for (const entry of taken(this.#pending)) entry.reject(this.#lost());
    this.#onEnd?.(this.#error);
  }

  // Closes the connection cleanly if the broker answers.
  async #leave() {
    try {
      await within(this.#connection.close(), CLOSE_MS);
    } catch (error) {
      this.#destroy(error);
    }
  }

  #destroy(error) {
    this.#connection.connection.stream.destroy(error);
  }

  // Ends the connection without waiting for the broker.
  abort(error) {
    this.#destroy(error);
    this.#fail(error);
  }

  async close() {
    this.#end(new Error('the client was closed'));
    // The end of the channel goes after its messages. The end of the connection may overtake them.
    try {
      await within(this.#channel.close(), CLOSE_MS);
    } catch {
      // The channel has already ended.
    }
    await this.#leave();
  }
}

export class Publisher {
  #settings;
  #silenceMs;
  #limit;
  #groups;
  #session = null;
  // Lists that wait for a session, and calls that wait for the confirm of their list.
  #waiting = new Set();
  #calls = new Set();
  #lastError = null;
  #isClosed = false;

  constructor({ amqpUrl, deadlineMs, heartbeatS, inFlightMax, groupMs }) {
    const url = parsed('amqpUrl', amqpUrl);
    if (!url.searchParams.has('heartbeat')) url.searchParams.set('heartbeat', heartbeatS);
    this.#settings = { url: url.href, deadlineMs };
    // The client detects a stalled broker after half of the deadline. The other half is for the next connection.
    this.#silenceMs = deadlineMs / 2;
    this.#limit = new Limit(inFlightMax);
    this.#groups = new Groups(groupMs, (list) => this.#send(list));
    this.#keepConnected();
  }

  async #keepConnected() {
    let pauseMs = PAUSE_MIN_MS;
    while (!this.#isClosed) {
      try {
        const session = await Session.open(this.#settings.url, this.#silenceMs);
        if (this.#isClosed) return await session.close();
        this.#session = session;
        pauseMs = PAUSE_MIN_MS;
        for (const entry of taken(this.#waiting)) entry.resolve();
        this.#lastError = await session.ended();
      } catch (error) {
        this.#lastError = error;
        // If RabbitMQ refused the login, fail all waiting calls. Later calls wait for the next try.
        if (error.message.startsWith('Handshake terminated by server: 403 ')) {
          for (const entry of taken(this.#waiting)) entry.reject(new LoginRefused(error.message));
        }
      }
      this.#session = null;
      // This timer does not keep the process running. A call that waits for a confirm has its own timer.
      await new Promise((resolve) => setTimeout(resolve, pauseMs * (0.5 + Math.random() / 2)).unref());
      pauseMs = Math.min(pauseMs * 2, PAUSE_MAX_MS);
    }
  }

  // Publishes an event as a message of `exchange`, `routingKey`, `body` and `traceparent`. Resolves when the broker has the
  // event on disk, in a queue.
  async publish(event, message, timeoutMs) {
    const endsAt = performance.now() + timeoutMs;
    const call = new Call(timeoutMs);
    try {
      await this.#limit.enter(call);
      try {
        if (this.#isClosed) throw new Closed();
        await call.wait(this.#calls, (entry) => this.#groups.add({ ...message, endsAt, entry }));
      } finally {
        this.#limit.leave();
      }
    } catch (error) {
      throw this.#explained(error, event, message.exchange);
    } finally {
      call.end();
    }
  }

  async #send({ message, endsAt, entries }) {
    const call = new Call(endsAt - performance.now());
    try {
      await this.#untilConfirmed(call, message);
      for (const entry of entries) entry.resolve();
    } catch (error) {
      for (const entry of entries) entry.reject(error);
    } finally {
      call.end();
      for (const entry of entries) this.#calls.delete(entry);
    }
  }

  async #untilConfirmed(call, message) {
    let wasSent = false;
    while (true) {
      while (!this.#session) {
        if (this.#isClosed) throw new Closed();
        await call.wait(this.#waiting).catch((error) => {
          // If an earlier session has sent the event, the event may have arrived. Then wait for the next session.
          if (!(error instanceof LoginRefused) || !wasSent) throw error;
        });
      }
      wasSent = true;
      const error = await this.#tried(this.#session, call, message);
      if (!error) return;
      this.#lastError = error;
      // Let the outer loop remove the session first.
      await new Promise((resolve) => setImmediate(resolve));
    }
  }

  // Publishes in this session. Returns the error if a retry in the next session can help. Throws any other error.
  async #tried(session, call, message) {
    try {
      await session.publish(call, message);
      return null;
    } catch (error) {
      if (!(error instanceof Lost) || [403, 404].includes(error.cause?.code)) throw error;
      return error;
    }
  }

  #explained(error, event, exchange) {
    if (error instanceof Closed) {
      const message = 'the client was closed before RabbitMQ confirmed the event. It may have arrived: publish `event` again, which is safe';
      return new UnconfirmedError(message, event);
    }
    if (error instanceof Late) {
      const blocked = this.#session?.blocked;
      const why = blocked ? `RabbitMQ blocks publishers: ${blocked}` : (this.#lastError?.message ?? 'no answer');
      const message = `RabbitMQ did not confirm the event in ${this.#settings.deadlineMs} ms (${why}). It may have arrived: publish \`event\` again, which is safe`;
      return new UnconfirmedError(message, event, { cause: this.#lastError });
    }
    if (error instanceof LoginRefused) {
      const message = `RabbitMQ refused the login (${error.message}): check user and password in \`amqpUrl\`, then publish \`event\` again`;
      return new LoginError(message, event);
    }
    if (error instanceof Nack) {
      const message = 'RabbitMQ rejected the event (nack): a queue is full or failed. Check the queues, then publish `event` again';
      return new NackedError(message, event);
    }
    if (error instanceof Return) {
      const message = `no queue takes the event (${error.message}): exchange ${exchange} has no binding for it. Start the daemon once: it declares the queues. Then publish \`event\` again`;
      return new ReturnedError(message, event);
    }
    if (error.cause?.code === 404) {
      const message = `${error.message}. Start the daemon once, which declares the exchange; then publish \`event\` again`;
      return new ReturnedError(message, event, { cause: error });
    }
    const message = `${error.message}. Allow the account to write to ${exchange}, then publish \`event\` again`;
    return new RejectedError(message, event, { cause: error });
  }

  async close() {
    // Lets the calls of this turn of the event loop join their list.
    await new Promise((resolve) => setImmediate(resolve));
    this.#groups.flush();
    this.#isClosed = true;
    const session = this.#session;
    this.#session = null;
    for (const entry of taken(this.#waiting)) entry.reject(new Closed());
    await session?.close();
  }
}
