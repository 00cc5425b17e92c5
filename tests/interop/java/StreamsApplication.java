import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.Properties;
import java.util.StringJoiner;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.WindowStore;

/**
 * Kafka Streams, exactly once, from one topic into another.
 *
 * "copy" has no state: every record, with a mark. "count" has a windowed store with a changelog: for every record, how
 * many with its key are in its minute so far, under the key "KEY@START".
 *
 * Arguments: topology, bootstrap, application id, source, target, state directory, commit interval in ms, and how many
 * ms each record takes. It says "running" once it runs, answers each line "state" with one line of JSON about the store,
 * and ends cleanly with its standard input.
 */
public final class StreamsApplication {
    private static final String STORE = "counts";

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[1]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[2]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[5]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, arguments[6]);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        // What a killed process leaves behind, a member and a transaction, is to be gone soon.
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG), 6_000);
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG), 500);
        settings.put(StreamsConfig.producerPrefix(ProducerConfig.TRANSACTION_TIMEOUT_CONFIG), 5_000);
        // A record is sent as it is processed, so that a transaction is seen while it is open.
        settings.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 0);

        long recordMs = Long.parseLong(arguments[7]);
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> source = builder.<String, String>stream(arguments[3])
                .peek((key, value) -> pause(recordMs));
        boolean counts = arguments[0].equals("count");
        (counts ? counted(source) : source.mapValues(value -> value + "!")).to(arguments[4]);

        CountDownLatch running = new CountDownLatch(1);
        Restored restored = new Restored();
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
            streams.setUncaughtExceptionHandler(error -> {
                error.printStackTrace();
                return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
            });
            streams.setStateListener((now, before) -> {
                if (now == KafkaStreams.State.RUNNING) {
                    running.countDown();
                }
            });
            streams.setGlobalStateRestoreListener(restored);
            streams.start();
            if (!running.await(60, TimeUnit.SECONDS)) {
                throw new IllegalStateException("not running: " + streams.state());
            }
            System.out.println("running");
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            while (lines.readLine() != null) {
                System.out.println("{\"restored\": " + restored.records.get() + ", \"counts\": " + stored(streams) + "}");
            }
        }
    }

    private static KStream<String, String> counted(KStream<String, String> source) {
        return source.groupByKey()
                .windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofMinutes(1), Duration.ofHours(1)))
                // Without the cache every update of the store is a record of the changelog.
                .count(Materialized.<String, Long, WindowStore<Bytes, byte[]>>as(STORE)
                        .withRetention(Duration.ofHours(2))
                        .withCachingDisabled())
                .toStream()
                .map((key, count) -> KeyValue.pair(key.key() + "@" + key.window().start(), count.toString()));
    }

    private static String stored(KafkaStreams streams) {
        StringJoiner entries = new StringJoiner(", ", "{", "}");
        var query = StoreQueryParameters.fromNameAndType(STORE, QueryableStoreTypes.<String, Long>windowStore());
        try (KeyValueIterator<Windowed<String>, Long> all = streams.store(query).all()) {
            while (all.hasNext()) {
                KeyValue<Windowed<String>, Long> entry = all.next();
                entries.add("\"" + entry.key.key() + "@" + entry.key.window().start() + "\": " + entry.value);
            }
        }
        return entries.toString();
    }

    /** Counts what is read from changelogs. */
    private static final class Restored implements StateRestoreListener {
        final AtomicLong records = new AtomicLong();

        @Override
        public void onRestoreStart(TopicPartition partition, String store, long start, long end) {}

        @Override
        public void onBatchRestored(TopicPartition partition, String store, long last, long count) {
            records.addAndGet(count);
        }

        @Override
        public void onRestoreEnd(TopicPartition partition, String store, long total) {}
    }

    private static void pause(long milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
