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
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;
