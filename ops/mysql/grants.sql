CREATE DATABASE tally;
CREATE USER 'tallyd'@'%' IDENTIFIED BY 'choose-one';
GRANT SELECT, INSERT, UPDATE, DELETE ON tally.* TO 'tallyd'@'%';
GRANT CREATE, ALTER, DROP ON tally.applied_event TO 'tallyd'@'%';
GRANT CREATE, ALTER, DROP ON tally.recent_delta TO 'tallyd'@'%';
CREATE USER 'tallyd_migrate'@'%' IDENTIFIED BY 'choose-another';
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX ON tally.* TO 'tallyd_migrate'@'%';
CREATE USER 'tallyd_api'@'%' IDENTIFIED BY 'choose-a-third';
GRANT SELECT ON tally.* TO 'tallyd_api'@'%';
