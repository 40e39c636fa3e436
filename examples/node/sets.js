// Events that set a number, for instance of unread messages. Published with `Client.publish`, as counts are.

import { aTime, anId, Refused } from './client.js';

// Metrics whose [[rule]] says settable = true, and of which kinds.
export const settable = { unread: ['video'] };

// `set` makes a number the value, `reset` makes it zero. Of two events the newer `at` wins, whichever comes first.
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
