import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.protocol.MessageUtil;

/** Lines of "name version json" in, the bytes Kafka's own classes make of them out, in hexadecimal. */
public final class KafkaMessages {
    private static final String PACKAGE = "org.apache.kafka.common.message.";
    private static final String METADATA = "org.apache.kafka.common.metadata.";

    public static void main(String[] arguments) throws Exception {
        ObjectMapper mapper = new ObjectMapper();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ", 3);
            short version = Short.parseShort(words[1]);
            String name = words[0].matches(".*(Request|Response)") ? words[0] + "Data" : words[0];
            Message message = (Message) Class.forName(packageOf(name) + name + "JsonConverter")
                .getMethod("read", JsonNode.class, short.class)
                .invoke(null, mapper.readTree(words[2]), version);
            ByteBuffer written = MessageUtil.toByteBufferAccessor(message, version).buffer();
            byte[] bytes = new byte[written.remaining()];
            written.get(bytes);
            System.out.println(HexFormat.of().formatHex(bytes));
        }
    }

    private static String packageOf(String name) {
        return name.matches(".*(Credential|Entry|Quota)Record") ? METADATA : PACKAGE;
    }
}
