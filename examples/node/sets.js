// Makes events that set a number, for instance the number of unread messages. Publish them with `Client.publish`.

import { aTime, anId, Refused } from './client.js';

// The metrics whose [[rule]] has settable = true, with their kinds.
export const settable = { unread: ['video'] };

// Returns an event that sets a number to a value (`set`) or to zero (`reset`). The event with the newest `at` wins, in
// any order of arrival.
export function setEventOf({ kinds, metrics }, type, kind, targetId, metric, value, at) {
  if (type !== 'set' && type !== 'reset') throw new Refused('unknown-type', type);
  if (!Object.hasOwn(kinds, kind)) throw new Refused('unknown-kind', kind);
  const event = { type, kind, target_id: anId(targetId), metric };
  const isSettable = Object.hasOwn(settable, metric);
  if (!metrics.includes(metric) && !isSettable) throw new Refused('unknown-metric', metric);
  if (!isSettable || !settable[metric].includes(kind)) throw new Refused('not-settable', metric);
  if (type === 'reset') return { ...event, at: aTime(at) };
  if (!Number.isInteger(value) || Math.abs(value) > 2 ** 53) throw new Refused('value-out-of-range', value);
  return { ...event, value, at: aTime(at) };
}
