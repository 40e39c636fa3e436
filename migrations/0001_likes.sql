-- Whether a user likes a target. No surrogate id and no secondary index: each would nearly halve the write rate.
-- A recount is a range scan of the key, "does this user like these targets" a few point reads.
CREATE TABLE IF NOT EXISTS like_record (
    kind      TINYINT UNSIGNED NOT NULL,
    target_id BIGINT UNSIGNED  NOT NULL,
    user_id   BIGINT UNSIGNED  NOT NULL,
    is_del    BOOLEAN          NOT NULL,
    update_at DATETIME(6)      NOT NULL COMMENT 'UTC: the event''s `at`, its version',
    PRIMARY KEY (kind, target_id, user_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- The numbers of a target, one row per partition that wrote it (slot): two writers never wait for each other's row.
-- The value is SUM(value) over the slots.
CREATE TABLE IF NOT EXISTS counter (
    kind      TINYINT UNSIGNED  NOT NULL,
    target_id BIGINT UNSIGNED   NOT NULL,
    metric    TINYINT UNSIGNED  NOT NULL,
    slot      SMALLINT UNSIGNED NOT NULL,
    value     BIGINT            NOT NULL,
    update_at DATETIME(6)       NOT NULL COMMENT 'UTC: the newest `at` that was applied',
    update_span INT UNSIGNED AS (TIMESTAMPDIFF(MINUTE, '1970-01-01', update_at) DIV 5) STORED,
    PRIMARY KEY (kind, target_id, metric, slot),
    KEY counter_update_span (update_span)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- What each code has meant here: it must never mean anything else while there is a row with it.
CREATE TABLE IF NOT EXISTS kind_name (
    kind       TINYINT UNSIGNED NOT NULL,
    name       VARCHAR(64)      NOT NULL,
    removed_at DATETIME(6)      NULL COMMENT 'a configuration was without it, and nothing had it',
    PRIMARY KEY (kind)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS metric_name (
    metric     TINYINT UNSIGNED NOT NULL,
    name       VARCHAR(64)      NOT NULL,
    removed_at DATETIME(6)      NULL COMMENT 'a configuration was without it, and nothing had it',
    PRIMARY KEY (metric)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
