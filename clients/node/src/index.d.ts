/// <reference lib="esnext.disposable" />

/** An id from 1 to 2^63-1. A number must be a safe integer: larger ones are text or BigInt. */
export type Id = string | number | bigint;

/** An event as it is published. `JSON.stringify` takes it. */
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

/** An event of a list. `at` is the clock's unless it is given, and the `event_id` of a count a new one. */
export type NewEvent = Omit<TallydEvent, 'at' | 'target_id' | 'user_id'> & At & { target_id: Id; user_id?: Id };

/** All settings have the daemon's defaults. They must be as in its config.toml. */
export interface Settings {
  /** RabbitMQ, for publishing; without it the gateway publishes. */
  amqpUrl?: string;
  /** Redis, for reading numbers, and who counts them. */
  redisUrl?: string;
  /** URL of `tallyd gateway`: http://, https:// or unix:///path. It reads in place of Redis, and counts where API servers do. */
  gateway?: string;
  /** The gateway's token. */
  token?: string;
  /** [amqp] prefix */
  prefix?: string;
  /** [amqp] partition_by */
  partitionBy?: 'user' | 'target';
  /** [redis] key_prefix */
  keyPrefix?: string;
  /** [redis] bucket_bits */
  bucketBits?: number;
  /** [metrics]: names and codes, for reading from Redis. Names that are not in it are refused; without it all are allowed. */
  metrics?: Record<string, number>;
  /** [kinds]: names. Others are refused; without it all are allowed. */
  kinds?: readonly string[];
  /** How long a call can take. */
  deadlineMs?: number;
  /** [amqp] heartbeat_s */
  heartbeatS?: number;
  /** Events without a confirm at one time; further calls wait. */
  inFlightMax?: number;
  /** Called at each publish: the header `traceparent` of its messages (W3C Trace Context), undefined for none. */
  traceparent?: () => string | undefined;
}

export interface At {
  /** Microseconds since 1970, by the sender's clock at the click. A retry of the same click has the same `at`. */
  at?: number | bigint;
}

export interface Member {
  rank: number;
  member: string;
  score: number;
}

export interface Board {
  board: string;
  period: string;
  members: Member[];
  around?: Member[];
}

export class Tallyd implements AsyncDisposable {
  constructor(settings?: Settings);
  /** Resolves with the event once the broker has it on disk, in a queue. */
  like(kind: string, targetId: Id, userId: Id, options?: At): Promise<TallydEvent>;
  unlike(kind: string, targetId: Id, userId: Id, options?: At): Promise<TallydEvent>;
  count(kind: string, targetId: Id, metric: string, delta?: number, options?: At & { eventId?: string }): Promise<TallydEvent>;
  set(kind: string, targetId: Id, metric: string, value: number, options?: At): Promise<TallydEvent>;
  reset(kind: string, targetId: Id, metric: string, options?: At): Promise<TallydEvent>;
  /** Publishes an event again, for instance that of an error. */
  publish(event: TallydEvent): Promise<TallydEvent>;
  /** Publishes events together, each as one message. Rejects with PublishManyError where one was not confirmed. */
  publishMany(events: Iterable<NewEvent>): Promise<TallydEvent[]>;
  /** The number of each target, by the ids as they were given; null where it is unknown, which is not zero. */
  counts<T extends Id>(kind: string, targetIds: Iterable<T>, metric?: string): Promise<Map<T, number | null>>;
  /** Whether the user likes each target. Through the gateway alone. */
  liked<T extends Id>(kind: string, targetIds: Iterable<T>, userId: Id): Promise<Map<T, boolean>>;
  /** A board's members with rank and score. Through the gateway alone. */
  board(name: string, options?: { period?: string; top?: number; around?: Id; radius?: number }): Promise<Board>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Base class of all errors of this package. */
export class TallydError extends Error {}
/** An argument is not valid. Nothing was sent. */
export class RefusedError extends TallydError {
  /** The daemon's name for the problem, as in docs/events.md. */
  readonly reason: string;
}
/** The broker did not confirm `event`. `site.publish(error.event)` publishes the same event again. */
export class PublishError extends TallydError {
  readonly event: TallydEvent;
}
/** No confirm arrived before the deadline. The broker can have the event all the same. */
export class UnconfirmedError extends PublishError {}
/** The broker rejected the event. Fix the cause first, then publish the event again. */
export class RejectedError extends PublishError {}
/** A queue rejected the event, for instance because it is full. */
export class NackedError extends RejectedError {}
/** No queue takes the event: exchange or queues do not exist. */
export class ReturnedError extends RejectedError {}
/** RabbitMQ refused user and password. The event was not sent. */
export class LoginError extends RejectedError {}
/** The user clicks too often, by the gateway's limit. */
export class LimitedError extends RejectedError {
  /** After how many milliseconds the event can be published. */
  readonly waitMs: number;
}
/** Some events of a list were not confirmed. */
export class PublishManyError extends TallydError {
  /** Each event or its error, in order. */
  readonly results: (TallydEvent | TallydError)[];
  /** Those to publish again: `site.publishMany(error.events)`. Refused ones are not among them. */
  readonly events: TallydEvent[];
}
/** Redis or the gateway did not answer. The number is unknown, not zero. */
export class ReadError extends TallydError {}
/** The gateway rejected the request. */
export class GatewayError extends ReadError {
  readonly status: number;
  /** The gateway's name for the problem. */
  readonly code: string | null;
}
