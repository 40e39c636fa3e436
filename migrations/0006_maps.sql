-- Which maps are in use ([[map]]: events of a site's own JSON), each with a queue of its own: noted before the queue is bound, so that whoever waits
-- for all events in flight knows the queue, whatever its configuration has.
CREATE TABLE IF NOT EXISTS map_in_use (
    number   TINYINT UNSIGNED NOT NULL COMMENT 'its partition is 60000 and this',
    name     VARCHAR(32)      NOT NULL,
    queue    VARCHAR(255)     NOT NULL,
    bindings TEXT             NOT NULL COMMENT 'JSON: [exchange, key], all that the queue was ever bound with',
    noted_at DATETIME(6)      NOT NULL,
    noted_by VARCHAR(255)     NOT NULL COMMENT 'the daemon that came with it',
    definition BINARY(32)     NOT NULL DEFAULT '' COMMENT 'SHA-256 of the map: another map begins a new trial',
    taken    INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'events of the trial that were applied',
    refused  INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'events of the trial that became dead letters',
    stopped  TINYINT(1)       NOT NULL DEFAULT 0 COMMENT '1: nearly all events of the trial were refused',
    PRIMARY KEY (number),
    UNIQUE KEY map_in_use_name (name)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
