// The site card: the site's settings, which the daemons write to Redis.

const VERSION = 1;
const FORMS = ['packed', 'entity', 'string'];
// A refusal for one of these reasons can come from an outdated card.
export const REASONS = ['unknown-kind', 'unknown-metric', 'not-settable', 'counted-by-api', 'at-too-early'];

// The card of a site that has none yet: the daemon's defaults. It has no lists of names, and so allows all names:
// RabbitMQ and the daemon decide.
export const DEFAULT = { kinds: null, metrics: null, api: [], settable: null, belowZero: [], exchange: 'tally.events', partitionBy: 'user', atMinS: 1262304000 };

// Returns the card, or `null` if there is none that this version can read.
export function parsed(text) {
  try {
    const card = JSON.parse(text);
    const { version, layout, kinds, metrics, api, settable, below_zero: belowZero, exchange, partition_by: partitionBy, at_min_s: atMinS } = card;
    const { form, bucket_bits: bucketBits, counter_key: counterKey } = layout;
    const isKnown = version === VERSION && FORMS.includes(form) && [kinds, metrics, api, settable, belowZero, exchange, partitionBy].every(Boolean) && Number.isInteger(atMinS);
    return isKnown ? { kinds, metrics, api, settable, belowZero, exchange, partitionBy, atMinS, form, bucketBits, counterKey } : null;
  } catch {
    return null;
  }
}
