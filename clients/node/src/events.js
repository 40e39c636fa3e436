// Validates events by the rules of docs/events.md. The daemon rejects the same events, for the same reasons.

import { inspect } from 'node:util';
import { RefusedError } from './errors.js';

const ID_MAX = 2n ** 63n - 1n;
const AT_MAX = 253402300799999999;
const DELTA_MAX = 2 ** 31;
const VALUE_MAX = 2 ** 53;
const EVENT_ID_MAX = 64;
const TYPES = ['like', 'unlike', 'count', 'set', 'reset'];

// Returns the id as text. An id must have only digits, no sign and no leading zero. So each id has only one spelling.
export function anId(value, field = 'target_id') {
  const reason = `${field.replace('_', '-')}-out-of-range`;
  if (typeof value === 'number' && !Number.isSafeInteger(value)) {
    const problem = `${field} is the number ${value}, which can have lost its last digits: pass it as text or as a BigInt`;
    throw new RefusedError(reason, problem);
  }
  const text = typeof value === 'number' || typeof value === 'bigint' ? String(value) : value;
  if (typeof text !== 'string' || !/^[1-9][0-9]{0,18}$/.test(text) || BigInt(text) > ID_MAX) {
    throw new RefusedError(reason, `${field} is ${inspect(value)}, allowed is an integer or a decimal string, 1 to ${ID_MAX}`);
  }
  return text;
}

// Checks the name of a kind or a metric. Without a list of known names, any text is allowed.
export function aName(value, field, known) {
  if (!isText(value) || (known && !Object.hasOwn(known, value))) {
    const allowed = known ? Object.keys(known).join(', ') : 'non-empty text';
    throw new RefusedError(`unknown-${field}`, `${field} is ${inspect(value)}, allowed is ${allowed}`);
  }
  return value;
}

// Returns whether the value is text that UTF-8 can hold, without half of a surrogate pair.
const isText = (value) => typeof value === 'string' && value !== '' && !/\p{Cs}/u.test(value);

function integer(given, field, least, most) {
  const value = typeof given === 'bigint' ? Number(given) : given;
  // The limit 2^53 is allowed, although JavaScript does not count it as a safe integer.
  const isExact = Number.isSafeInteger(value) || value === VALUE_MAX || value === -VALUE_MAX;
  if (!isExact || BigInt(value) !== BigInt(given) || value < least || value > most) {
    throw new RefusedError(`${field}-out-of-range`, `${field} is ${inspect(given)}, allowed is an exact integer, ${least} to ${most}`);
  }
  return value;
}

// Checks an event against the site's card. Returns the event with only the fields that the daemon reads, in their usual
// order and form. `isNew` says that no script has counted the event: it is of a method such as `like`, or it came
// without `at`.
export function checked(event, card, isNew = false) {
  const { type } = event;
  if (!TYPES.includes(type)) {
    throw new RefusedError('unknown-type', `type is ${inspect(type)}, allowed are like, unlike, count, set and reset`);
  }
  const result = { type, kind: aName(event.kind, 'kind', card.kinds), target_id: anId(event.target_id) };
  if (type === 'like' || type === 'unlike') {
    result.user_id = anId(event.user_id, 'user_id');
  } else {
    result.metric = aName(event.metric, 'metric', card.metrics);
    if (result.metric === 'like') throw new RefusedError('unknown-metric', "metric is 'like': call like() and unlike() instead");
  }
  if ((type === 'set' || type === 'reset') && card.settable && !card.settable.includes(numberOf(result))) {
    throw new RefusedError('not-settable', `no rule of the site makes ${numberOf(result)} settable`);
  }
  if (type === 'count') {
    result.delta = integer(event.delta, 'delta', -DELTA_MAX, DELTA_MAX);
    if (!isText(event.event_id) || [...event.event_id].length > EVENT_ID_MAX) {
      const problem = `event_id is ${inspect(event.event_id)}, allowed is text of 1 to ${EVENT_ID_MAX} characters`;
      throw new RefusedError('event-id-out-of-range', problem);
    }
    result.event_id = event.event_id;
  }
  if (type === 'set') result.value = integer(event.value, 'value', -VALUE_MAX, VALUE_MAX);
  result.at = integer(event.at, 'at', 1, AT_MAX);
  if (result.at < card.atMinS * 1_000_000) {
    const least = new Date(card.atMinS * 1_000).toISOString();
    throw new RefusedError('at-too-early', `at is ${result.at}, which is before ${least}: write microseconds since 1970, for instance Date.now() * 1000`);
  }
  if (isNew && card.api.includes(numberOf(result))) {
    const problem = `API servers count ${numberOf(result)}: call the script in docs/scripts.md, then publish the event with the script's \`at\``;
    throw new RefusedError('counted-by-api', problem);
  }
  return result;
}

// Returns the name of the number that the event changes, for instance video:like.
const numberOf = ({ kind, metric = 'like' }) => `${kind}:${metric}`;

export function routingKeyOf(event, partitionBy) {
  return partitionBy === 'user' && event.user_id !== undefined ? event.user_id : event.target_id;
}

// Returns the time in microseconds since 1970. Each call returns a later time, even if the clock goes back a little.
export class Clock {
  #last = 0;
  #now;

  constructor(now = () => Date.now() * 1_000) {
    this.#now = now;
  }

  at() {
    let now = this.#now();
    // If the clock goes back by a second or more, someone has corrected it. Then use the corrected time.
    if (now <= this.#last && this.#last - now < 1_000_000) now = this.#last + 1;
    this.#last = now;
    return now;
  }
}
