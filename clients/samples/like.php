<?php
// Publishes a like through `tallyd gateway`, and reads the number: php like.php KIND TARGET_ID USER_ID
[, $kind, $target, $user] = $argv;
$gateway = getenv('TALLYD_GATEWAY') ?: 'http://127.0.0.1:9191';
$http = ['header' => ['Content-Type: application/json', 'Authorization: Bearer ' . getenv('TALLYD_TOKEN')], 'timeout' => 5, 'ignore_errors' => true];
// The time of the click. A retry sends the same time.
$event = ['type' => 'like', 'kind' => $kind, 'target_id' => $target, 'user_id' => $user, 'at' => (int) (microtime(true) * 1e6)];
$post = stream_context_create(['http' => $http + ['method' => 'POST', 'content' => json_encode($event)]]);
for ($tries = 5, $status = '503'; $tries > 0 && $status === '503'; $tries--) {
    if ($tries < 5) sleep(1);
    $answer = @file_get_contents("$gateway/v1/events", false, $post);
    $status = $answer === false ? '503' : explode(' ', $http_response_header[0])[1];
}
if ($status !== '202') {
    fwrite(STDERR, "$status $answer\n");
    exit(1);
}
echo $answer, "\n", file_get_contents("$gateway/v1/counters?kind=$kind&ids=$target", false, stream_context_create(['http' => $http])), "\n";
