# Publishes a like through `tallyd gateway`, and reads the number: ruby like.rb KIND TARGET_ID USER_ID
require 'json'
require 'net/http'

kind, target, user = ARGV
gateway = ENV.fetch('TALLYD_GATEWAY', 'http://127.0.0.1:9191')
headers = { 'Content-Type' => 'application/json', 'Authorization' => "Bearer #{ENV['TALLYD_TOKEN']}" }
# The time of the click. A retry sends the same time.
event = { type: 'like', kind: kind, target_id: target, user_id: user, at: (Time.now.to_r * 1_000_000).to_i }
answer = nil
5.times do |tries|
  sleep(1) if tries > 0
  answer = Net::HTTP.post(URI("#{gateway}/v1/events"), event.to_json, headers) rescue next
  break unless answer.code == '503'
end
abort "#{answer&.code} #{answer&.body}" unless answer.is_a?(Net::HTTPAccepted)
puts answer.body, Net::HTTP.get(URI("#{gateway}/v1/counters?kind=#{kind}&ids=#{target}"), headers)
