-- Orders of operators that last for a while. All daemons of the site read them once a second and obey until `until_at`, by this server's clock.
CREATE TABLE IF NOT EXISTS control (
    task               VARCHAR(16)  NOT NULL COMMENT 'consumer, outbox, reconcile, archive',
    command            VARCHAR(16)  NOT NULL COMMENT 'pause, throttle',
    targets_per_second INT UNSIGNED NULL     COMMENT 'of a throttle',
    ordered_at         DATETIME(6)  NOT NULL,
    until_at           DATETIME(6)  NOT NULL,
    ordered_by         VARCHAR(255) NOT NULL COMMENT 'user and host',
    reason             VARCHAR(255) NOT NULL COMMENT 'empty: none was given',
    PRIMARY KEY (task, command)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- The settings that clients of the site need (docs/site-card.schema.json). A daemon replaces them when it starts or is reloaded with others, and
-- all daemons copy them to Redis.
CREATE TABLE IF NOT EXISTS site_card (
    one    TINYINT UNSIGNED NOT NULL COMMENT 'always 1: there is one row',
    number BIGINT UNSIGNED  NOT NULL COMMENT 'of the card: a daemon replaces the row only where it is still the one that it has read',
    card   MEDIUMTEXT       NOT NULL COMMENT 'JSON',
    since  DATETIME(6)      NOT NULL,
    `by`   VARCHAR(255)     NOT NULL COMMENT 'the daemon that came with it',
    PRIMARY KEY (one)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
