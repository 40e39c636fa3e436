/// <reference lib="esnext.disposable" />

/** An id from 1 to 2^63-1. A number must be a safe integer. Pass larger ids as text or BigInt. */
export type Id = string | number | bigint;

/** An event in the published form, valid for `JSON.stringify`. */
export interface TallydEvent {
  type: 'like' | 'unlike' | 'count' | 'set' | 'reset';
  kind: string;
  target_id: string;
  user_id?: string;
  metric?: string;
  delta?: number;
  event_id?: string;
  value?: number;
  at: number;
}

/** An event of a list. Without `at` it gets the current time. A count without `event_id` gets a new id. */
export type NewEvent = Omit<TallydEvent, 'at' | 'target_id' | 'user_id'> & At & { target_id: Id; user_id?: Id };

/** A client needs only the addresses of servers. It reads the site's settings from Redis, where the daemons keep them.
 * Without Redis it publishes with the daemon's default settings. */
export interface Settings {
  /** RabbitMQ, for publishing. Without this setting, the gateway publishes. */
  amqpUrl?: string;
  /** Redis or a node of a Redis Cluster, for reading the site's settings and numbers. */
  redisUrl?: string;
  /** URL of `tallyd gateway`: http://, https:// or unix:///path. It replaces Redis for reading numbers. */
  gateway?: string;
  /** The gateway's token. */
  token?: string;
  /** [redis] key_prefix */
  keyPrefix?: string;
  /** The timeout of a call, in milliseconds. */
  deadlineMs?: number;
  /** [amqp] heartbeat_s */
  heartbeatS?: number;
  /** The largest number of unconfirmed events in flight. Further calls wait. */
  inFlightMax?: number;
  /** The minimum time between two lists of events, in milliseconds. Events that calls publish meanwhile wait for this time at
   * most, and then go as one list of up to 100 events. An event after a longer pause goes at once. 0: only
   * calls of one turn of the event loop go together. By default 2. */
  groupMs?: number;
  /** The client calls this function for each publish. It returns the `traceparent` of the events (W3C Trace Context), or
   * undefined for none. Another value is ignored. */
  traceparent?: () => string | undefined;
}

export interface At {
  /** The time of the click in microseconds since 1970, by default now. A retry of the same click has the same `at`. */
  at?: number | bigint;
}

export interface Member {
  rank: number;
  member: string;
  score: number;
  /** The second score. Only boards with `tie = "second"` have it. */
  second?: number;
}

export interface Board {
  board: string;
  period: string;
  /** Whether Redis has lost this open board. If so, members or points are missing. */
  lost: boolean;
  members: Member[];
  around?: Member[];
}

export class Tallyd implements AsyncDisposable {
  constructor(settings?: Settings);
  /** Resolves with the event once the broker has it on disk, in a queue. Rejects with RefusedError, or with PublishError
   * if no confirm arrived. */
  like(kind: string, targetId: Id, userId: Id, options?: At): Promise<TallydEvent>;
  unlike(kind: string, targetId: Id, userId: Id, options?: At): Promise<TallydEvent>;
  count(kind: string, targetId: Id, metric: string, delta?: number, options?: At & { eventId?: string }): Promise<TallydEvent>;
  set(kind: string, targetId: Id, metric: string, value: number, options?: At): Promise<TallydEvent>;
  reset(kind: string, targetId: Id, metric: string, options?: At): Promise<TallydEvent>;
  /** Publishes an event again, for instance the event of an error, or an event that a script has counted. */
  publish(event: TallydEvent): Promise<TallydEvent>;
  /** Publishes events together. Rejects with PublishManyError if an event was not confirmed. */
  publishMany(events: Iterable<NewEvent>): Promise<TallydEvent[]>;
  /** Reads the number of each target. The map has the ids as given. `null` means that the number is unknown, not
   * zero. Rejects with ReadError if no server answered. */
  counts<T extends Id>(kind: string, targetIds: Iterable<T>, metric?: string): Promise<Map<T, number | null>>;
  /** Reads whether the user likes each target. Needs the gateway. */
  liked<T extends Id>(kind: string, targetIds: Iterable<T>, userId: Id): Promise<Map<T, boolean>>;
  /** Reads a board's members with rank and score. Needs the gateway. */
  board(name: string, options?: { period?: string; top?: number; around?: Id; radius?: number }): Promise<Board>;
  /** Sends the events that wait for each other, and closes the connections. A call that waits for a confirm rejects with
   * UnconfirmedError; through the gateway it first waits for the gateway's answer. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Base class of all errors of this package. */
export class TallydError extends Error {}
/** The call does not fit the site. Nothing was sent. */
export class RefusedError extends TallydError {
  /** The daemon's code for the problem, as in docs/events.md, or `counted-by-api`: API servers must count this number
   * with a script (docs/scripts.md). */
  readonly reason: string;
}
/** The broker did not confirm `event`. `site.publish(error.event)` publishes the same event again. */
export class PublishError extends TallydError {
  readonly event: TallydEvent;
}
/** No confirm arrived before the deadline. The broker may have the event nevertheless. */
export class UnconfirmedError extends PublishError {}
/** The broker rejected the event. Fix the cause first, then publish the event again. */
export class RejectedError extends PublishError {}
/** A queue rejected the event, for instance because it is full. */
export class NackedError extends RejectedError {}
/** No queue takes the event: the exchange or the queues do not exist. */
export class ReturnedError extends RejectedError {}
/** RabbitMQ refused the user or the password. The event was not sent. */
export class LoginError extends RejectedError {}
/** The user clicks more often than the gateway allows. */
export class LimitedError extends RejectedError {
  /** The time in milliseconds until the event can be published. */
  readonly waitMs: number;
}
/** Some events of a list were not confirmed. */
export class PublishManyError extends TallydError {
  /** One result for each event, in order: the event, or its error. */
  readonly results: (TallydEvent | TallydError)[];
  /** The events to publish again: `site.publishMany(error.events)`. Refused events are not included. */
  readonly events: TallydEvent[];
}
/** Redis or the gateway did not answer. The number is unknown, not zero. */
export class ReadError extends TallydError {}
/** The gateway rejected the request. */
export class GatewayError extends ReadError {
  readonly status: number;
  /** The gateway's code for the problem. */
  readonly code: string | null;
}
